"""The same work in TRL, timed round by round; run by beside_trl.py with a Python that has TRL.

PYTHON_WITH_TRL tests/acceptance/trl_rounds.py MODEL PROMPTS.jsonl ROLLOUTS MINIBATCHES GROUP TOKENS ROUNDS
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class Rounds(TrainerCallback):  # type: ignore[misc]
    """Notes the time after every round."""

    def __init__(self, minibatches: int) -> None:
        """`minibatches` optimizer steps make a round."""
        self.minibatches = minibatches
        self.marks: list[float] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """The first round begins."""
        self.marks.append(time.monotonic())

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """A round ends with its last step."""
        if state.global_step % self.minibatches == 0:
            self.marks.append(time.monotonic())


def main() -> int:
    """Print the median seconds of a round, the first one left out, as JSON."""
    model, prompts = sys.argv[1:3]
    rollouts, minibatches, group, tokens, rounds = map(int, sys.argv[3:])
    draw = random.Random(0)

    def reward(completions: list[str], **_: Any) -> list[float]:
        return [draw.gauss(0, 1) for _ in completions]  # every group has signal, so that all of it is work

    rows = [json.loads(line) for line in Path(prompts).read_text().splitlines()]
    clock = Rounds(minibatches)
    with tempfile.TemporaryDirectory() as folder:
        settings = GRPOConfig(
            output_dir=folder,
            use_cpu=True,
            bf16=False,
            per_device_train_batch_size=rollouts // minibatches,
            steps_per_generation=minibatches,
            gradient_accumulation_steps=1,
            num_generations=group,
            max_completion_length=tokens,
            generation_kwargs={"min_new_tokens": tokens},
            temperature=1.0,
            beta=0.0,
            loss_type="dapo",
            learning_rate=1e-12,
            max_steps=minibatches * (rounds + 1),
            gradient_checkpointing=False,
            save_strategy="no",
            logging_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=reward,
            args=settings,
            train_dataset=Dataset.from_list([{"prompt": row["prompt"]} for row in rows]),
            processing_class=AutoTokenizer.from_pretrained(model, padding_side="left"),
            callbacks=[clock],
        )
        trainer.train()
    seconds = [later - earlier for earlier, later in zip(clock.marks, clock.marks[1:], strict=False)][1:]
    sys.stdout.write(json.dumps({"round": statistics.median(seconds), "samples": seconds}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
