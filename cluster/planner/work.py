"""What one round has to do, in tokens: the part of a configuration that memory and time depend on."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Work:
    """One round."""

    prompts: int
    """P."""
    group_size: int
    """G."""
    minibatches: int
    """Optimizer steps."""
    prompt_tokens: float
    """Mean length of a prompt."""
    response_tokens: float
    """Mean length of a response."""
    longest: int
    """Tokens of the longest response; one of a round's thousands is taken to reach it."""
    longest_row: int
    """Tokens of the longest prompt with the longest response."""
    microbatch_tokens: int
    """Padded tokens a rank puts through the model at once."""
    max_num_seqs: int
    """Responses an engine generates at once."""
    old_logprobs: bool
    """The learner recomputes log-probs at the start of a round with more than one step."""
    reference: bool
    """A KL term with its frozen reference."""
    adapter: int = 0
    """Parameters of a LoRA adapter, when only that is trained (0: all weights are)."""

    @property
    def responses(self) -> int:
        """Responses of the round."""
        return self.prompts * self.group_size

    @property
    def tokens(self) -> float:
        """Tokens generated in the round."""
        return self.responses * self.response_tokens

    @property
    def rows(self) -> float:
        """Tokens the learner puts through the model: every response behind its prompt."""
        return self.responses * (self.prompt_tokens + self.response_tokens)

    @property
    def largest_microbatch(self) -> int:
        """Tokens of the largest microbatch: the budget, or one row that is longer; never more than there is."""
        whole = self.responses // self.minibatches * self.longest_row
        return min(max(self.microbatch_tokens, self.longest_row), whole)

    @property
    def passes(self) -> float:
        """Forward passes of the learner over the round's rows, a backward pass counting as two."""
        old = (1 - 1 / self.minibatches) if self.old_logprobs else 0.0
        return 3.0 + old + (1.0 if self.reference else 0.0)
