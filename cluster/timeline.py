"""What one process did and when: spans of its own monotonic clock. Switched off, it keeps nothing and costs nothing."""

from __future__ import annotations

import contextlib
import functools
import inspect
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

MOST_SPANS = 50_000


@dataclass(frozen=True, slots=True)
class Span:
    """One stretch of work; an instant when it ends where it begins."""

    name: str
    """What was done."""
    begin: float
    """Monotonic seconds of the process that did it."""
    end: float
    """The same clock."""
    detail: Mapping[str, int | float | str] = field(default_factory=dict)
    """What to show beside it."""
    lane: str = ""
    """Spans that overlap others of their process without lying inside them go into lanes of their own."""


class Timeline:
    """Keeps the newest spans of a process."""

    _OFF: ClassVar[contextlib.nullcontext[None]] = contextlib.nullcontext()

    def __init__(self, *, on: bool, clock: Callable[[], float] = time.monotonic) -> None:
        """`on` False: nothing is kept, and `span` returns one shared context that does nothing."""
        self.on = on
        self._clock = clock
        self._spans: deque[Span] = deque(maxlen=MOST_SPANS)

    def span(self, name: str, **detail: int | float | str) -> contextlib.AbstractContextManager[None]:
        """A context; the time inside it becomes a span, also when it is left by an exception."""
        return self._span(name, detail) if self.on else self._OFF

    def mark(self, name: str, **detail: int | float | str) -> None:
        """An instant."""
        if self.on:
            now = self._clock()
            self._spans.append(Span(name, now, now, detail))

    def add(self, name: str, begin: float, end: float, lane: str = "", **detail: int | float | str) -> None:
        """A span whose ends are known already."""
        if self.on:
            self._spans.append(Span(name, begin, end, detail, lane))

    def between(self, begin: float, end: float) -> list[Span]:
        """Spans that touch a stretch of this process's clock, in the order in which they ended."""
        return [span for span in self._spans if span.end >= begin and span.begin <= end]

    @contextlib.contextmanager
    def _span(self, name: str, detail: Mapping[str, int | float | str]) -> Iterator[None]:
        began = self._clock()
        try:
            yield
        finally:
            self._spans.append(Span(name, began, self._clock(), detail))


class Stopwatch:
    """Adds up the time inside its context; a context inside another counts once."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._depth = 0
        self._began = 0.0

    def __enter__(self) -> Stopwatch:
        if not self._depth:
            self._began = time.monotonic()
        self._depth += 1
        return self

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if not self._depth:
            self.seconds += time.monotonic() - self._began

    def take(self) -> float:
        """Seconds since the last time it was asked; what is still inside counts the next time."""
        taken, self.seconds = self.seconds, 0.0
        return taken


class Worker:
    """A process that says how long it was at work, and what it did: methods are marked with `work`."""

    def __init__(self, *, traced: bool) -> None:
        """`traced`: spans are kept."""
        self.timeline = Timeline(on=traced)
        self.busy = 0.0
        """Seconds inside marked methods since the process began."""


def work(name: str) -> Callable[[Any], Any]:
    """Marks a method of a Worker: its time counts as work, and each call is a span of that name.

    Of a stream, the time between two items does not count: there the process waits to be asked.
    """

    def mark(method: Any) -> Any:
        @functools.wraps(method)
        def call(self: Worker, *args: Any, **options: Any) -> Any:
            began = time.monotonic()
            try:
                with self.timeline.span(name):
                    return method(self, *args, **options)
            finally:
                self.busy += time.monotonic() - began

        @functools.wraps(method)
        def stream(self: Worker, *args: Any, **options: Any) -> Iterator[Any]:
            items = method(self, *args, **options)
            with self.timeline.span(name):
                while True:
                    began = time.monotonic()
                    try:
                        item = next(items)
                    except StopIteration:
                        return
                    finally:
                        self.busy += time.monotonic() - began
                    yield item

        return stream if inspect.isgeneratorfunction(method) else call

    return mark


@contextlib.contextmanager
def around(timeline: Timeline, owner: Any, names: Mapping[str, str], settle: Callable[[], None]) -> Iterator[None]:
    """For a while, make a span of every call of some methods of an object: method name -> span name.

    `settle` runs before a span ends: on a GPU it waits until the device has done what was asked of it. Nothing is
    touched while the timeline is off.
    """
    if not timeline.on:
        yield
        return
    for method, name in names.items():
        setattr(owner, method, _spanned(getattr(owner, method), timeline, name, settle))
    try:
        yield
    finally:
        for method in names:
            delattr(owner, method)


def _spanned(method: Any, timeline: Timeline, name: str, settle: Callable[[], None]) -> Any:
    if inspect.isgeneratorfunction(method):

        def stream(*args: Any, **options: Any) -> Generator[Any, Any, Any]:
            with timeline.span(name):
                result = yield from method(*args, **options)
                settle()
                return result

        return stream

    def call(*args: Any, **options: Any) -> Any:
        with timeline.span(name):
            result = method(*args, **options)
            settle()
            return result

    return call
