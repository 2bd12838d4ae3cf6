"""The only place that waits for other processes: every wait has a deadline and names what it waits for."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, GetTimeoutError, RayActorError, RayError, RayTaskError

from cluster.errors import RemoteFailure


@dataclass(frozen=True, slots=True)
class ActorLost(Exception):
    """One actor of many is gone or silent; the caller decides whether it can be replaced."""

    name: str
    """Which actor."""
    reason: str
    """What is known, the remote traceback included."""
    hung: bool
    """True when it lives but made no progress before its deadline."""

    def __str__(self) -> str:
        return f"{self.name}: {self.reason}"


def fetch(refs: Any, seconds: float, what: str) -> Any:
    """`ray.get` with a deadline. Raises RemoteFailure naming what was waited for, with the remote traceback."""
    try:
        return ray.get(refs, timeout=seconds)
    except (RayError, OSError) as error:
        raise RemoteFailure(f"{what}: {describe(error, seconds)}") from None


def fetch_all(refs: Mapping[str, Any], seconds: float, what: str) -> dict[str, Any]:
    """Results by name; the first failure wins, and one that never answers is named."""
    pending = {ref: name for name, ref in refs.items()}
    results: dict[str, Any] = {}
    deadline = time.monotonic() + seconds
    while pending:
        ready, _ = ray.wait(list(pending), num_returns=1, timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise RemoteFailure(f"{what}: no answer from {', '.join(sorted(pending.values()))} within {seconds:g} s")
        name = pending.pop(ready[0])
        results[name] = fetch(ready[0], 30.0, f"{what}, {name}")
    return results


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


def stream(generators: dict[str, Any], silence: float) -> Iterator[tuple[str, Any]]:
    """Items of several streaming actor calls as they come, by name.

    Every item is a sign of life. An actor that dies or stays silent for `silence` seconds raises ActorLost; the other
    streams can be continued by calling again: finished and lost ones are taken out of `generators`.
    """
    alive = generators
    heard = dict.fromkeys(alive, time.monotonic())
    while alive:
        names = {id(generator): name for name, generator in alive.items()}
        ready, _ = ray.wait(list(alive.values()), num_returns=1, timeout=1.0, fetch_local=False)
        now = time.monotonic()
        for generator in ready:
            name = names[id(generator)]
            try:
                item = ray.get(next(generator), timeout=30.0)
            except StopIteration:
                del alive[name]
                continue
            except (RayError, OSError) as error:
                del alive[name]
                raise ActorLost(name, describe(error, 30.0), hung=isinstance(error, GetTimeoutError)) from None
            heard[name] = now
            yield name, item
            # Time the caller spent on the item must not count as silence of the others.
            spent = time.monotonic() - now
            heard = {key: at + spent for key, at in heard.items()}
        for name in list(alive):
            if now - heard[name] > silence:
                del alive[name]
                raise ActorLost(name, f"no progress for {silence:g} s", hung=True)


def describe(error: BaseException, seconds: float) -> str:
    """A remote error as people need it: what happened there, not how Ray wrapped it."""
    if isinstance(error, GetTimeoutError):
        return f"no answer within {seconds:g} s"
    if isinstance(error, RayTaskError):
        return f"raised there:\n{error}"  # the remote traceback; its last line names the error
    if isinstance(error, ActorDiedError):
        return f"the process died ({_first_line(error)})"
    if isinstance(error, ActorUnavailableError | RayActorError):
        return f"the process cannot be reached ({_first_line(error)})"
    return f"{type(error).__name__}: {_first_line(error)}"


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
