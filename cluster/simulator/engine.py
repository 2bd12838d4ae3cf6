"""A modelled engine: continuous batching, one token per running response and step, a step as long as it costs."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cluster.planner.timing import Decoding
from cluster.simulator.clock import Clock


@dataclass(frozen=True, slots=True)
class EngineModel:
    """What an engine can do."""

    cost: Decoding
    """Seconds of a step."""
    slots: int
    """Responses that run at once: by the setting, or as many as the KV cache has room for."""
    prompt_tokens: float
    """Tokens of a prompt, part of what a step looks back on."""
    prefill: float
    """Seconds of reading one prompt; once per group, or with `prefill_each` once per response."""
    prefill_each: bool = False
    """Prompts are read anew for every response (a prompt shorter than a block of the prefix cache)."""
    grain: int = 1
    """Steps that are taken at once at least: responses that end within them end together. 1 is exact."""


@dataclass(frozen=True, slots=True)
class Piece:
    """One group that an engine is asked for."""

    key: tuple[str, int]
    """Which."""
    lengths: tuple[int, ...]
    """Tokens of its responses."""


class ModelledEngine:
    """One engine on a virtual clock."""

    def __init__(
        self, name: str, model: EngineModel, clock: Clock, answer: Callable[[str, Piece], None], slowness: float = 1.0
    ) -> None:
        """`answer(name, piece)` hears of every group that is finished; `slowness` stretches every second."""
        self.name, self.model, self.slowness = name, model, slowness
        self.busy = 0.0
        """Seconds in which something ran."""
        self.hung = False
        """It stands still, and nobody knows yet."""
        self._clock, self._answer = clock, answer
        self._waiting: deque[tuple[Piece, int]] = deque()
        self._running: list[tuple[float, int, int, tuple[str, int]]] = []
        self._left: dict[tuple[str, int], int] = {}
        self._pieces: dict[tuple[str, int], Piece] = {}
        self._read: set[tuple[str, int]] = set()
        self._steps = 0.0
        self._context = 0.0
        self._life = 0
        self._order = 0
        self._stepping = False

    @property
    def idle(self) -> bool:
        """True with nothing to do."""
        return not self._left

    def ask(self, pieces: Sequence[Piece]) -> None:
        """Give it groups; it begins with the first."""
        for piece in pieces:
            self._pieces[piece.key] = piece
            self._left[piece.key] = len(piece.lengths)
            self._waiting.extend((piece, length) for length in piece.lengths)
        if not self._stepping:
            self._next()

    def stop(self) -> None:
        """It is lost, or no longer wanted, with all it had begun."""
        self._life += 1
        self._stepping = False
        self._waiting.clear()
        self._running.clear()
        self._left.clear()
        self._pieces.clear()
        self._read.clear()
        self._context = 0.0

    def hang(self) -> None:
        """It does nothing any more, without a word."""
        self.hung = True
        self._life += 1

    def _next(self) -> None:
        """Let responses in, and come back when the next one has finished."""
        self._stepping = True
        delay = self._admit()
        running = len(self._running)
        steps = max(self._running[0][0] - self._steps, float(self.model.grain))
        # The tokens looked back on grow with every step: their mean is that of the middle.
        context = self._context / running + (steps - 1) / 2
        seconds = self.slowness * (delay + steps * self.model.cost.seconds(running, context))
        life = self._life
        self._clock.after(seconds, lambda: self._finish(life, steps, seconds))

    def _admit(self) -> float:
        """Fill the slots; seconds of reading the prompts that came in."""
        delay = 0.0
        while self._waiting and len(self._running) < self.model.slots:
            piece, length = self._waiting.popleft()
            self._order += 1
            heapq.heappush(self._running, (self._steps + length, self._order, length, piece.key))
            self._context += self.model.prompt_tokens
            if self.model.prefill_each or piece.key not in self._read:
                delay += self.model.prefill
            self._read.add(piece.key)
        return delay

    def _finish(self, life: int, steps: float, seconds: float) -> None:
        """The steps are done: responses have ended, groups may be whole."""
        if life != self._life:
            return
        self._stepping = False
        self.busy += seconds
        running = len(self._running)
        self._steps += steps
        self._context += steps * running
        whole = []
        while self._running and self._running[0][0] <= self._steps:
            ends, _, length, key = heapq.heappop(self._running)
            self._context -= self.model.prompt_tokens + length + self._steps - ends
            self._left[key] -= 1
            if not self._left[key]:
                whole.append(key)
        for key in whole:
            if life != self._life:
                return  # what it heard was enough: nobody waits for the rest
            del self._left[key]
            self._answer(self.name, self._pieces.pop(key))
        if life == self._life and self._left and not self._stepping:
            self._next()
