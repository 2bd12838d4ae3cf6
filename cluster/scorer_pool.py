"""Scores groups while others are generated, with everything that may hang or crash in processes that can be killed.

Most answers are decided by the fast stages in `submit` and never see a process. The others, and users' functions, go to
a lane of processes that this pool's one thread looks after. Groups come back whole, in the order they are done.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from cluster.errors import RemoteFailure
from cluster.open_group import OpenGroup
from cluster.scorer_lane import MATH, PATIENCE, START_SECONDS, Job, Lane
from cluster.timeline import Timeline
from rollout.config import RewardConfig
from rollout.rewards.answers import gold_answer
from rollout.rewards.custom import CORRECTNESS, TIMED_OUT
from rollout.rewards.loading import split_spec
from rollout.scoring import RIGHT_FROM, Graded, Scoring, own_scorer, score_group, settle_group
from rollout.types import Group, ScoredGroup

WORKERS = 2
"""Grading processes; they start only when an answer needs one."""
_REMEMBERED = 100_000
_SECONDS_OVER = 1.0  # an async function enforces its own deadlines; ours stands a little behind


@dataclass
class ScorerCounts:
    """What the pool has done so far."""

    responses: int = 0
    """Responses of groups that came back."""
    asked: int = 0
    """Items that went to a process."""
    timeouts: int = 0
    """Answers that ran into the deadline or the memory limit, killed their process, or asked for too large numbers."""
    refused: int = 0
    """Of those, the ones that asked for too large numbers and were never evaluated."""
    errors: int = 0
    """Responses whose grader failed."""


class ScorerPool:
    """`submit` groups, take `ready` ones, `drain` the rest, `close`."""

    def __init__(self, config: RewardConfig, scoring: Scoring, log: Path | None = None) -> None:
        self.config, self.scoring = config, scoring
        self.counts = ScorerCounts()
        self.timeline = Timeline(on=False)
        """When each group was scored, for a trace."""
        self.last_error = ""
        self._log = log.open("ab") if log is not None else None
        self._lock = threading.Condition()
        self._inbox: list[Callable[[], None]] = []
        self._done: list[ScoredGroup] = []
        self._unfinished = 0
        self._failure: Exception | None = None
        self._closing = False
        self._verdicts: dict[tuple[str, str], str] = {}
        self._asked: dict[tuple[str, str], list[tuple[OpenGroup, int]]] = {}
        self._part_names: dict[str, frozenset[str]] = {}
        self._largest = 1
        self._lanes: dict[str, Lane] = {}
        self._waiting: dict[str, list[OpenGroup]] = {}
        self._selector = selectors.DefaultSelector()
        self._bell, self._ear = socket.socketpair()
        self._bell.setblocking(False)
        self._ear.setblocking(False)
        self._selector.register(self._ear, selectors.EVENT_READ, self._listen)
        self._own = ":".join(split_spec(scoring.reward_function)) if scoring.reward_function else ""
        self._thread = threading.Thread(target=self._run, name="scorer-pool", daemon=True)
        self._thread.start()

    # What the driver calls.

    def submit(self, group: Group) -> None:
        """Take a group; never waits. Its scores come out of `ready` or `drain`."""
        size = len(group.texts)
        opened = OpenGroup(group, own_scorer(group.request.prompt) or self._own, [None] * size, [None] * size)
        with self._lock:
            self._raise_failure()
            self._unfinished += 1
            self._largest = max(self._largest, size)
            if opened.own:
                self._call(partial(self._enter_lane, opened))
            else:
                self._grade(opened)

    def ready(self) -> list[ScoredGroup]:
        """Groups that have been scored since the last call; never waits."""
        with self._lock:
            self._raise_failure()
            done, self._done = self._done, []
        return done

    def drain(self, deadline: float | None = None) -> Iterator[ScoredGroup]:
        """All groups that are still to come, as they are done. `deadline`: seconds without any of them (default: what
        the items in question may take at most).
        """
        return (scored for scored in self.arrivals(deadline) if scored is not None)

    def arrivals(self, deadline: float | None = None, tick: float = 0.05) -> Iterator[ScoredGroup | None]:
        """The same for a caller with other work to look after: None whenever there was none for `tick` seconds."""
        waited = 0.0
        while True:
            with self._lock:
                # One group at worst: a start, and every response twice up to its deadline.
                slowest = START_SECONDS + 2 * PATIENCE * self._largest * (self.config.deadline + _SECONDS_OVER)
                patience = slowest if deadline is None else deadline
                if not self._done and self._unfinished:
                    self._lock.wait_for(lambda: bool(self._done or self._failure), min(tick, patience))
                self._raise_failure()
                done, self._done = self._done, []
                left = self._unfinished
            yield from done
            if done:
                waited = 0.0
                continue
            if not left:
                return
            waited += tick
            if waited >= patience:
                raise RemoteFailure(f"{left} groups were not scored: nothing came within {patience:.0f} s.")
            yield None

    def close(self) -> None:
        """End all processes and the thread; may be called twice."""
        self._closing = True
        with self._lock:
            self._call(_nothing)
        self._thread.join(timeout=30.0)
        if self._log is not None:
            self._log.close()

    @property
    def pids(self) -> list[int]:
        """Grading processes that live now."""
        return [pid for lane in list(self._lanes.values()) for pid in lane.pids]

    @property
    def restarts(self) -> int:
        """Grading processes that were killed or died."""
        return sum(lane.restarts for lane in list(self._lanes.values()))

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    # Built-in correctness. Called with the lock held.

    def _grade(self, opened: OpenGroup) -> None:
        """Settle what the fast stages can, and ask about the rest; outcomes that are there already stay."""
        gold = gold_answer(opened.group.request.prompt.answer)
        for k, (answer, settled) in enumerate(settle_group(opened.group, self.scoring)):
            if opened.outcomes[k] is not None:
                continue
            verdict = self._verdicts.get((answer or "", gold)) if settled == "needs math-verify" else settled
            if verdict is None:
                self._ask(opened, k, answer or "", gold)
            else:
                self._settle(opened, k, verdict)
        self._finish_if_complete(opened)

    def _ask(self, opened: OpenGroup, k: int, answer: str, gold: str) -> None:
        opened.pending += 1
        if (answer, gold) in self._asked:  # the same answer is being looked at for another response
            self._asked[answer, gold].append((opened, k))
            return
        self._asked[answer, gold] = [(opened, k)]
        row_id = opened.group.request.prompt.row_id
        seconds = PATIENCE * self.config.deadline
        job = Job({"answer": answer, "gold": gold}, row_id, seconds, partial(self._verdict, answer, gold))
        self._call(partial(self._enqueue, MATH, [job]))

    def _settle(self, opened: OpenGroup, k: int, verdict: str) -> None:
        """Write down a verdict: right, wrong, error, refused (too large to evaluate) or lost (deadline, memory)."""
        if verdict in ("refused", "lost"):
            opened.timeouts += 1
            self.counts.timeouts += 1
            self.counts.refused += verdict == "refused"
            verdict = "wrong"
        self.counts.errors += verdict == "error"
        opened.outcomes[k] = verdict

    def _verdict(self, answer: str, gold: str, reply: dict[str, Any]) -> None:
        """A process has answered about one answer (in the pool's thread)."""
        if "broken" in reply:
            self.last_error = str(reply["broken"])
        verdict = "error" if "broken" in reply else "lost" if "lost" in reply else str(reply["verdict"])
        with self._lock:
            if verdict != "error":
                if len(self._verdicts) >= _REMEMBERED:
                    self._verdicts.clear()
                self._verdicts[answer, gold] = verdict
            for opened, k in self._asked.pop((answer, gold)):
                self._settle(opened, k, verdict)
                opened.pending -= 1
                self._finish_if_complete(opened)

    # Users' functions. In the pool's thread.

    def _enter_lane(self, opened: OpenGroup) -> None:
        lane = self._lane(opened.own)
        if lane.style:
            self._enqueue(opened.own, list(self._jobs_of(lane, opened)))
        else:  # how the function wants to be called is known when its first process is ready
            self._waiting.setdefault(opened.own, []).append(opened)
            if not lane.pids:
                lane.start()

    def _jobs_of(self, lane: Lane, opened: OpenGroup) -> Iterator[Job]:
        size = len(opened.group.texts)
        one_by_one = lane.style == "response" and not lane.is_async
        # Async calls of one response wait together and enforce their own deadlines, but what they compute adds up.
        seconds = self.config.deadline * (1 if one_by_one else size) + (_SECONDS_OVER if lane.is_async else 0.0)
        pieces = [range(k, k + 1) for k in range(size)] if one_by_one else [range(size)]
        opened.pending = len(pieces)
        for ks in pieces:
            done = partial(self._values, opened, ks, one_by_one)
            item = {"group": opened.input(ks, self.scoring)}
            yield Job(item, opened.group.request.prompt.row_id, seconds, done)

    def _values(self, opened: OpenGroup, ks: range, single: bool, reply: dict[str, Any]) -> None:
        """A user's function has answered, or has not, about some responses of a group."""
        where = f"row {opened.group.request.prompt.row_id}" + (f", response {ks.start}" if single else "")
        # One answer that ran into its deadline is wrong. A whole group that did names no answer: the function failed.
        lost = single and "lost" in reply and "died" not in reply["lost"]
        failed = f"--reward {opened.own}, {where}: {reply.get('broken') or reply.get('lost')}"
        with self._lock:
            for k, value in zip(ks, reply.get("parts") or [TIMED_OUT if lost else failed] * len(ks), strict=True):
                if isinstance(value, dict):
                    opened.parts[k] = value
                else:
                    self._settle(opened, k, "lost" if value == TIMED_OUT else "error")
                    self.last_error = self.last_error if value == TIMED_OUT else value
            opened.pending -= 1
            if opened.pending == 0:
                self._after_own(opened)

    def _after_own(self, opened: OpenGroup) -> None:
        """All values of a group are there: verdicts from its `correctness`, or else from the built-in comparison."""
        names = opened.names(self._part_names.get(opened.own))
        if names:
            self._part_names[opened.own] = names
        if names and CORRECTNESS not in names:
            self._grade(opened)
            return
        for k, parts in enumerate(opened.parts):
            if parts is not None:
                self._settle(opened, k, "right" if parts[CORRECTNESS] >= RIGHT_FROM else "wrong")
        self._finish_if_complete(opened)

    def _finish_if_complete(self, opened: OpenGroup) -> None:
        if opened.pending or None in opened.outcomes:
            return
        outcomes = tuple(str(outcome) for outcome in opened.outcomes)
        parts = opened.arrays(self._part_names.get(opened.own, ())) if opened.own else {}
        graded = Graded(outcomes, opened.timeouts, parts)
        self._done.append(score_group(opened.group, graded, self.scoring, self.config))
        if self.timeline.on:
            row = opened.group.request.prompt.row_id
            self.timeline.add("score", opened.began, time.monotonic(), row=row, responses=len(outcomes))
        self.counts.responses += len(outcomes)
        self._unfinished -= 1
        self._lock.notify_all()

    # The thread.

    def _call(self, action: Callable[[], None]) -> None:
        """Have the thread do something; the lock is held."""
        self._inbox.append(action)
        with contextlib.suppress(OSError):  # the bell's pipe is full: it rings already; it is closed: nobody listens
            self._bell.send(b"\0")

    def _listen(self) -> None:
        self._ear.recv(4096)

    def _lane(self, spec: str) -> Lane:
        if spec not in self._lanes:
            config = self.config
            self._lanes[spec] = Lane(spec, config.memory_mb, config.deadline, WORKERS, self._selector, self._log)
        return self._lanes[spec]

    def _enqueue(self, spec: str, jobs: list[Job]) -> None:
        self._lane(spec).jobs.extend(jobs)
        self.counts.asked += len(jobs)

    def _run(self) -> None:
        try:
            while not self._closing:
                self._turn()
        except Exception as failure:  # noqa: BLE001  the thread's boundary: the driver raises it
            with self._lock:
                self._failure = failure
                self._lock.notify_all()
        finally:
            for lane in self._lanes.values():
                lane.close()
            self._selector.close()
            self._bell.close()
            self._ear.close()

    def _turn(self) -> None:
        with self._lock:
            actions, self._inbox = self._inbox, []
        for action in actions:
            action()
        for spec, lane in self._lanes.items():
            if lane.style and self._waiting.get(spec):
                for opened in self._waiting.pop(spec):
                    self._enqueue(spec, list(self._jobs_of(lane, opened)))
            lane.work()
        due = min((due for lane in self._lanes.values() if (due := lane.next_due()) is not None), default=None)
        timeout = None if due is None else max(0.0, due - time.monotonic())
        with self._lock:
            timeout = 0.0 if self._inbox else timeout
        for key, _ in self._selector.select(timeout):
            key.data()
        for lane in self._lanes.values():
            lane.enforce(time.monotonic())


def _nothing() -> None:
    """Only wakes the thread."""
