"""The only place that waits for other processes: every wait has a deadline and names what it waits for."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterator, Mapping
from typing import Any

import ray
from ray.exceptions import (
    ActorDiedError,
    ActorUnavailableError,
    GetTimeoutError,
    RayActorError,
    RayError,
    RayTaskError,
    TaskCancelledError,
)

from cluster.errors import RemoteFailure

COLOURS = re.compile(r"\x1b\[[0-9;]*m")
"""Ray paints its tracebacks for terminals."""


class ActorLost(RemoteFailure):
    """One actor of many died, hangs, or raised; whoever supervises it decides whether it can be replaced."""

    def __init__(self, name: str, reason: str, *, hung: bool = False, cause: BaseException | None = None) -> None:
        """`hung`: it lives and made no progress before its deadline. `cause`: what it raised, unless it died."""
        super().__init__(f"{name}: {reason}")
        self.name, self.reason, self.hung, self.cause = name, reason, hung, cause

    def __reduce__(self) -> tuple[type, tuple[str, str]]:
        """Picklable, with the texts only."""
        return (type(self), (self.name, self.reason))


class NoSeat(ActorLost):
    """An engine cannot be started: its node is gone, and no other has room for it now."""


def headline(reason: str) -> str:
    """A reason in one line: of a traceback the last, which names the error."""
    lines = [line.strip() for line in reason.splitlines() if line.strip()] or [reason]
    return f"{lines[0]} {lines[-1]}" if len(lines) > 1 and lines[0].endswith(":") else lines[0]


def actor_lost(name: str, error: BaseException, seconds: float) -> ActorLost:
    """What an error of Ray says about the actor it came from."""
    cause = error.cause if isinstance(error, RayTaskError) else None
    return ActorLost(name, describe(error, seconds), hung=isinstance(error, GetTimeoutError), cause=cause)


def fetch_all(refs: Mapping[str, Any], seconds: float, what: str) -> dict[str, Any]:
    """Results by name. ActorLost names the first that failed, or one that never answered."""
    pending = {ref: name for name, ref in refs.items()}
    results: dict[str, Any] = {}
    deadline = time.monotonic() + seconds
    while pending:
        ready, _ = ray.wait(list(pending), num_returns=1, timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            silent = sorted(pending.values())
            raise ActorLost(silent[0], f"{what}: no answer from {', '.join(silent)} within {seconds:g} s", hung=True)
        name = pending.pop(ready[0])
        try:
            results[name] = ray.get(ready[0], timeout=30.0)
        except (RayError, OSError) as error:
            lost = actor_lost(name, error, 30.0)
            raise ActorLost(name, f"{what}: {lost.reason}", hung=lost.hung, cause=lost.cause) from None
    return results


def fetch_those(refs: Mapping[str, Any], seconds: float) -> dict[str, Any]:
    """Results by name, of those that answer in time; for what nothing depends on."""
    ready, _ = ray.wait(list(refs.values()), num_returns=len(refs), timeout=seconds) if refs else ([], [])
    results: dict[str, Any] = {}
    for name, ref in refs.items():
        if ref in ready:
            with contextlib.suppress(RayError, OSError):
                results[name] = ray.get(ref, timeout=30.0)
    return results


def dead_among(refs: Mapping[str, Any], seconds: float) -> str | None:
    """The first whose call says that its process is gone; one that does not answer in time may be busy."""
    ready, _ = ray.wait(list(refs.values()), num_returns=len(refs), timeout=seconds)
    for name, ref in refs.items():
        if ref in ready:
            try:
                ray.get(ref, timeout=30.0)
            except RayActorError:
                return name
            except (RayError, OSError):
                continue
    return None


def references(generator: Any, seconds: float, what: str) -> Iterator[Any]:
    """References of one streaming call as they appear, not fetched; each within `seconds`."""
    while True:
        ready, _ = ray.wait([generator], num_returns=1, timeout=seconds, fetch_local=False)
        if not ready:
            raise RemoteFailure(f"{what}: nothing within {seconds:g} s")
        try:
            yield next(generator)
        except StopIteration:
            return


class Ended:
    """A stream has come to its end."""


ENDED = Ended()


class Watch:
    """Streams and single calls of many actors, waited for together; one per name at a time."""

    def __init__(self) -> None:
        """Nothing is waited for."""
        self._open: dict[str, Any] = {}
        self._ending: set[str] = set()

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, name: str) -> bool:
        return name in self._open

    def names(self) -> list[str]:
        """Who is waited for."""
        return list(self._open)

    def add(self, name: str, answer: Any) -> None:
        """Wait for an actor's stream (a generator of references) or call (a reference)."""
        self._open[name] = answer

    def drop(self, name: str) -> None:
        """Do not wait for it any longer."""
        self._open.pop(name, None)
        self._ending.discard(name)

    def cancel(self, name: str) -> None:
        """Ask an actor to stop its stream when it next looks (`is_canceled`); nothing but its end comes then, as ENDED.

        Only the call is waited for, not the stream: that one ends at once, and Ray's `next` then blocks, without a
        deadline, until the actor has answered; one that is frozen never does.
        """
        stream = self._open[name]
        ray.cancel(stream)
        self._open[name] = stream.completed()
        self._ending.add(name)

    def poll(self, seconds: float) -> list[tuple[str, Any]]:
        """What has come, after at most `seconds`: (name, item or answer | ENDED | an ActorLost that is not raised).

        One item of each stream at most; after anything but an item the name is not waited for any more.
        """
        if not self._open:
            time.sleep(seconds)
            return []
        names = {id(answer): name for name, answer in self._open.items()}
        answers = list(self._open.values())
        ready, _ = ray.wait(answers, num_returns=1, timeout=seconds, fetch_local=False)
        if ready and len(answers) > 1:
            ready, _ = ray.wait(answers, num_returns=len(answers), timeout=0, fetch_local=False)
        return [self._received(names[id(answer)], answer) for answer in ready]

    def _received(self, name: str, answer: Any) -> tuple[str, Any]:
        is_stream = not isinstance(answer, ray.ObjectRef)
        try:
            value = ray.get(next(answer) if is_stream else answer, timeout=30.0)
            value = ENDED if name in self._ending else value
        except (StopIteration, TaskCancelledError):
            value = ENDED
        except (RayError, OSError) as error:
            value = actor_lost(name, error, 30.0)
        if not is_stream or value is ENDED or isinstance(value, ActorLost):
            self.drop(name)
        return name, value


def describe(error: BaseException, seconds: float) -> str:
    """A remote error as people need it: what happened there, not how Ray wrapped it."""
    if isinstance(error, GetTimeoutError):
        return f"no answer within {seconds:g} s"
    if isinstance(error, RayTaskError):
        return f"raised there:\n{COLOURS.sub('', str(error))}"  # the remote traceback; its last line names the error
    if isinstance(error, ActorDiedError):
        return f"the process died ({_first_line(error)})"
    if isinstance(error, ActorUnavailableError | RayActorError):
        return f"the process cannot be reached ({_first_line(error)})"
    return f"{type(error).__name__}: {_first_line(error)}"


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
