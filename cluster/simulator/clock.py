"""A clock that jumps from one event to the next."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable


class Clock:
    """Virtual seconds, and what is to happen when."""

    def __init__(self) -> None:
        """Starts at 0 with nothing to come."""
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    def after(self, seconds: float, happen: Callable[[], None]) -> None:
        """Have something happen in so many seconds; what is due at the same time happens in the order of asking."""
        heapq.heappush(self._events, (self.now + seconds, next(self._order), happen))

    def step(self) -> bool:
        """Go on to the next event and let it happen; False when there is none."""
        if not self._events:
            return False
        self.now, _, happen = heapq.heappop(self._events)
        happen()
        return True
