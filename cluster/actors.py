"""The only code that Ray runs elsewhere: actors, thin shells around the engines, one method per verb of the loop."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
from collections.abc import Iterator, MutableMapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from cluster import faults
from cluster.memory import resident
from cluster.timeline import Span, Worker, around, work

if TYPE_CHECKING:
    from learner.engine import LearnerSettings
    from learner.types import Batch, SavedFile, Vote
    from learner.update import Update
    from rollout.engine import EngineSettings, Sampling
    from rollout.types import GroupRequest, Probe, Receipt, SharedBucket, WeightBucket


LEARNING = {"score": "forward", "backward": "backward", "step": "step"}
ROUND = {"check_mismatch": "compare with the engines", "recompute_old": "old log-probs", "step": "minibatch"}
"""Method of the learner engine, and of the update -> its span in a trace."""
TRACED_TICK = 0.02
"""Seconds between two looks at what an engine has finished, in a round that is traced."""


FOREIGN = ("VLLM_PORT", "MASTER_ADDR", "MASTER_PORT", "RANK", "LOCAL_RANK", "WORLD_SIZE")
"""What a shell or another launcher may have exported; here every process finds ports and ranks of its own."""


class Shell(Worker):
    """What every actor has: its own log file, a pid, and the digest of the code it runs."""

    def __init__(self, log: str, trace_round: int = 0) -> None:
        _log_to(log)
        super().__init__(traced=trace_round > 0)
        forget_foreign(os.environ)
        self._marks = Path(log).parent
        self._trace_round = trace_round

    def about(self) -> dict[str, Any]:
        """Where and what this process is."""
        from cluster.run.folder import code_digest, start_time

        code = code_digest(Path(__file__).parents[1])
        place = {"node": ray.get_runtime_context().get_node_id(), "gpus": ray.get_gpu_ids(), "gpu": _gpu()}
        me = {"pid": os.getpid(), "started": start_time(os.getpid()), "host": socket.gethostname()}
        return me | {"code": code} | place

    def usage(self) -> tuple[int, float]:
        """(resident memory in bytes, seconds at work since it began)."""
        return resident(), self.busy

    def clock(self) -> float:
        """Monotonic seconds of this process."""
        return time.monotonic()

    def spans(self, begin: float, end: float) -> list[Span]:
        """What it did in a stretch of its own clock (Timeline.between)."""
        return self.timeline.between(begin, end)

    def free_port(self) -> tuple[str, int]:
        """This node's address and a port that is free on it now."""
        host = ray.util.get_node_ip_address()
        with socket.socket() as probe:
            probe.bind((host, 0))
            return host, int(probe.getsockname()[1])


@ray.remote(max_restarts=0, max_task_retries=0)
class RolloutActor(Shell):
    """A process with one rollout engine."""

    def __init__(self, settings: EngineSettings, log: str, trace_round: int = 0) -> None:
        super().__init__(log, trace_round)
        from rollout.engine import RolloutEngine

        self._engine = RolloutEngine(settings)

    def ready(self) -> dict[str, Any]:
        """Answers once the engine is up."""
        return self.about()

    @work("generate")
    def generate(self, requests: Sequence[GroupRequest], sampling: Sampling) -> Iterator[Any]:
        """RolloutEngine.generate, as a stream."""
        index, round_ = self._engine.settings.index, requests[0].round
        faults.reach("gen.before", index, round_, self._marks)
        faults.arm_engine(self._engine, index, round_, self._marks)
        # Each group is to be seen when it ends: in the traced round, and in the evaluation after it.
        traced = self.timeline.on and self._trace_round in (round_, self._engine.version)
        ticks = {"tick": TRACED_TICK} if traced else {}
        for groups, tokens in self._engine.generate(requests, sampling, **ticks):
            for group in groups:
                self.timeline.mark("group done", row=group.request.prompt.row_id, tokens=len(group.token_ids))
            if groups:
                faults.reach("gen.mid", index, round_, self._marks)
            yield groups, tokens
            if ray.get_runtime_context().is_canceled():
                return  # others have answered what was left

    @work("open sync")
    def begin_load(self) -> None:
        """RolloutEngine.begin_load."""
        self._engine.begin_load()

    @work("load weights")
    def load_bucket(self, bucket: WeightBucket) -> int:
        """RolloutEngine.load_bucket."""
        return self._engine.load_bucket(bucket)

    @work("load weights")
    def load_shared(self, bucket: SharedBucket) -> int:
        """RolloutEngine.load_shared."""
        return self._engine.load_shared(bucket)

    @work("prove weights")
    def finish_load(self, version: int, probe: Probe) -> Receipt:
        """RolloutEngine.finish_load."""
        faults.reach("sync.recv", self._engine.settings.index, version, self._marks)
        return self._engine.finish_load(version, probe)

    def open_channel(self, host: str, port: int, rank: int, size: int, timeout: float) -> None:
        """RolloutEngine.open_channel."""
        self._engine.open_channel(host, port, rank, size, timeout)

    @work("load weights")
    def receive_bucket(self, names: list[str], shapes: list[tuple[int, ...]], dtype: str) -> int:
        """RolloutEngine.receive_bucket."""
        return self._engine.receive_bucket(names, shapes, dtype)

    def close_channel(self) -> None:
        """RolloutEngine.close_channel."""
        self._engine.close_channel()

    def devices(self) -> int:
        """Devices of the engine, each a member of a broadcast group."""
        return self._engine.settings.tensor_parallel

    @work("give up memory")
    def sleep(self) -> None:
        """RolloutEngine.sleep."""
        self._engine.sleep()

    @work("take memory")
    def wake(self, what: str) -> None:
        """RolloutEngine.wake."""
        self._engine.wake(what)


@ray.remote(max_restarts=0, max_task_retries=0)
class LearnerActor(Shell):
    """A process with one learner rank."""

    def __init__(self, log: str, trace_round: int = 0) -> None:
        super().__init__(log, trace_round)
        self._reference: Any = None

    def load(self, settings: LearnerSettings, host: str, port: int) -> dict[str, Any]:
        """Join the other ranks and load the model."""
        from learner.engine import LearnerEngine
        from learner.reference import Reference

        self._engine = LearnerEngine(settings, host, port)
        if settings.objective.kl != "none":
            self._reference = Reference(self._engine)
        return self.about()

    @work("update")
    def update(self, batch: Batch, first: bool) -> Iterator[Any]:
        """Train on a batch: a stream of minibatch counts that ends with the UpdateReport."""
        from learner.update import Update

        faults.arm_learner(self._engine, self._engine.settings.rank, batch.round, self._marks)
        update = Update(self._engine, self._reference, batch, first=first)
        with self._traced(update, batch.round):
            yield from update.run()

    @contextlib.contextmanager
    def _traced(self, update: Update, round_: int) -> Iterator[None]:
        """In the traced round, spans of every minibatch and of every pass through the model."""
        with contextlib.ExitStack() as stack:
            if round_ == self._trace_round:
                parts = [(self._engine, LEARNING), (update, ROUND), (self._reference, {"score": "reference"})]
                for owner, names in parts:
                    if owner is not None:
                        stack.enter_context(around(self.timeline, owner, names, self._settle))
            yield

    def _settle(self) -> None:
        """Wait until the device has done what was asked of it."""
        from learner.device import synchronise

        synchronise(self._engine.device)

    @work("compare with the engines")
    def check(self, batch: Batch) -> tuple[float, float]:
        """Update.check_mismatch on a batch that is not trained."""
        from learner.update import Update

        return Update(self._engine, self._reference, batch).check_mismatch()

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """learner.weights.shapes."""
        from learner.weights import shapes

        return shapes(self._engine)

    @work("send weights")
    def outgoing(self, dtype: str, bucket_bytes: int) -> Iterator[Any]:
        """The weights as buckets; ranks other than 0 take part in the gathering and send nothing."""
        from learner.weights import outgoing

        for bucket in outgoing(self._engine, dtype, bucket_bytes):
            if self._engine.settings.rank == 0:
                yield bucket

    def open_channel(self, host: str, port: int, size: int, timeout: float) -> None:
        """Rank 0 opens the broadcast group with the engines."""
        from learner.weights import BroadcastSender

        self._sender = BroadcastSender(self._engine, host, port, size, timeout)

    @work("send weights")
    def broadcast(self, dtype: str, bucket_bytes: int) -> Iterator[tuple[tuple[str, ...], list[tuple[int, ...]]]]:
        """Announce the names and shapes of each bucket (so that engines can start to receive), then broadcast it."""
        from learner.weights import outgoing_tensors

        for tensors in outgoing_tensors(self._engine, dtype, bucket_bytes):
            if self._engine.settings.rank == 0:
                yield tuple(name for name, _ in tensors), [tuple(tensor.shape) for _, tensor in tensors]
                self._sender.send(tensors)

    def begin_sharing(self, dtype: str, bucket_bytes: int) -> None:
        """learner.weights.SharedBuckets."""
        from learner.weights import SharedBuckets

        self._sharing = SharedBuckets(self._engine, dtype, bucket_bytes)

    @work("send weights")
    def next_shared(self) -> SharedBucket | None:
        """SharedBuckets.next."""
        return self._sharing.next()

    @work("give up memory")
    def park(self) -> None:
        """LearnerEngine.park."""
        self._engine.park()

    @work("take memory")
    def unpark(self) -> None:
        """LearnerEngine.unpark."""
        self._engine.unpark()

    @work("prove weights")
    def digests(self, probe: Probe) -> dict[str, str]:
        """learner.weights.digests."""
        from learner.weights import digests

        return digests(self._engine, probe)

    @work("checkpoint")
    def save(self, directory: str, round_: int) -> Vote:
        """learner.checkpoint.save."""
        from learner.checkpoint import save

        def reached(_: str) -> None:
            faults.reach("ckpt.shard", self._engine.settings.rank, round_, self._marks)

        return save(self._engine, self._reference, Path(directory), reached)

    def restore(self, directory: str, files: Sequence[SavedFile]) -> str:
        """learner.checkpoint.load."""
        from learner.checkpoint import load

        return load(self._engine, self._reference, Path(directory), files)

    def fingerprint(self) -> str:
        """learner.checkpoint.weights_sha256."""
        from learner.checkpoint import weights_sha256

        return weights_sha256(self._engine)

    @work("export")
    def export(self, directory: str) -> None:
        """Write the model in Hugging Face format (rank 0); the other ranks take part in the gathering."""
        from learner.weights import export

        export(self._engine, Path(directory))


def _look_around(mark: str, model: str) -> tuple[bool, bool]:
    """On another node, before anything is loaded: (the run directory is the same and open to us, the model is there).

    `mark` is a file that the driver has just made in the run directory. A hub id is there: each node fetches it itself.
    """
    same = Path(mark).is_file() and os.access(Path(mark).parent, os.W_OK | os.X_OK)
    return same, not Path(model).is_absolute() or (Path(model) / "config.json").is_file()


look_around = ray.remote(num_cpus=0, max_retries=0)(_look_around)


def _gpu() -> str:
    """What torch calls the device of this process; empty without one."""
    torch = sys.modules.get("torch")
    return str(torch.cuda.get_device_name()) if torch is not None and torch.cuda.is_available() else ""


def forget_foreign(environment: MutableMapping[str, str]) -> None:
    """Take FOREIGN variables away, with a line in the log of this process for each."""
    for name in FOREIGN:
        if (value := environment.pop(name, None)) is not None:
            sys.stderr.write(f"{name}={value} from the environment is not used\n")


def _log_to(path: str) -> None:
    """Send everything this process prints, C++ libraries included, to its own file."""
    target = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(target, 1)
    os.dup2(target, 2)
    os.close(target)
