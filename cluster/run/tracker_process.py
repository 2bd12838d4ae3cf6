"""The process of one tracker: it follows metrics.jsonl and hands the numbers on (see trackers.py)."""

from __future__ import annotations

import math
import os
import select
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from cluster.run.aliases import to_trl
from cluster.run.metrics import METRICS, decode_row
from cluster.run.saved_config import saved_settings

_POLL_SECONDS = 0.5


class Tracker(Protocol):
    """What a tracker must be able to do."""

    def log(self, values: Mapping[str, float], round_: int) -> None:
        """Send the numbers of a round."""

    def close(self) -> None:
        """Send what is left."""


class TensorBoardTracker:
    """Event files under `tensorboard/` of the run directory."""

    def __init__(self, run_folder: Path, config: Mapping[str, Any], offline: bool) -> None:
        from tensorboard.summary import Writer

        self._writer: Any = Writer(str(run_folder / "tensorboard"))

    def log(self, values: Mapping[str, float], round_: int) -> None:
        """One scalar per metric."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, round_)
        self._writer.flush()

    def close(self) -> None:
        """Close the event file."""
        self._writer.close()


class WandbTracker:
    """Weights & Biases, project `rollearn` (or WANDB_PROJECT); offline without an API key."""

    def __init__(self, run_folder: Path, config: Mapping[str, Any], offline: bool) -> None:
        import wandb

        mode = "offline" if offline or not wandb.api.api_key else os.environ.get("WANDB_MODE", "online")
        (run_folder / "wandb").mkdir(exist_ok=True)
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "rollearn"), name=run_folder.name, dir=str(run_folder),
            mode=mode, config=dict(config), settings=wandb.Settings(console="off", disable_git=True, save_code=False),
        )  # fmt: skip

    def log(self, values: Mapping[str, float], round_: int) -> None:
        """One record per round."""
        self._run.log(dict(values), step=round_)

    def close(self) -> None:
        """Upload what is left."""
        self._run.finish()


class TrackioTracker:
    """trackio, project `rollearn`; under `trackio/` of the run directory unless TRACKIO_SPACE_ID names a space."""

    def __init__(self, run_folder: Path, config: Mapping[str, Any], offline: bool) -> None:
        if offline:
            for name in ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL", "TRACKIO_DATASET_ID", "TRACKIO_BUCKET_ID"):
                os.environ.pop(name, None)
        os.environ.setdefault("TRACKIO_DIR", str(run_folder / "trackio"))
        import trackio

        self._run = trackio.init(
            project="rollearn", name=run_folder.name, config=dict(config), resume="allow", embed=False,
            auto_log_gpu=False, auto_log_cpu=False,
        )  # fmt: skip

    def log(self, values: Mapping[str, float], round_: int) -> None:
        """One record per round."""
        self._run.log(dict(values), step=round_)

    def close(self) -> None:
        """Send what is left."""
        self._run.finish()


class MlflowTracker:
    """MLflow, experiment `rollearn`; files under `mlflow/` of the run directory unless MLFLOW_TRACKING_URI is set."""

    def __init__(self, run_folder: Path, config: Mapping[str, Any], offline: bool) -> None:
        uri = os.environ.get("MLFLOW_TRACKING_URI")
        if offline or not uri:
            uri = (run_folder / "mlflow").as_uri()
            os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"  # plain files need no database driver
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        self._client, self._metric = MlflowClient(tracking_uri=uri), Metric
        known = self._client.get_experiment_by_name("rollearn")
        experiment = known.experiment_id if known else self._client.create_experiment("rollearn")
        self._id = self._client.create_run(experiment, run_name=run_folder.name).info.run_id
        params = [Param(name, str(value)[:500]) for name, value in config.items()]
        self._client.log_batch(self._id, params=params[:100])

    def log(self, values: Mapping[str, float], round_: int) -> None:
        """One batch per round; MLflow allows no `@` in names."""
        stamp = int(time.time() * 1000)
        metrics = [self._metric(name.replace("@", "_at_"), value, stamp, round_) for name, value in values.items()]
        for start in range(0, len(metrics), 500):
            self._client.log_batch(self._id, metrics=metrics[start : start + 500])

    def close(self) -> None:
        """Mark the run as finished."""
        self._client.set_terminated(self._id)


KINDS: dict[str, Any] = {
    "tensorboard": TensorBoardTracker,
    "wandb": WandbTracker,
    "trackio": TrackioTracker,
    "mlflow": MlflowTracker,
}


def numbers_of(row: Mapping[str, Any], trl: bool = False) -> dict[str, float]:
    """The finite numbers of a row, under our names or TRL's; detail per step is left out."""
    return {
        name: float(value)
        for name, value in (to_trl(row) if trl else row).items()
        if isinstance(value, int | float) and name not in ("round", "step") and math.isfinite(value)
    }


def follow(tracker: Tracker, run_folder: Path, trl: bool, first_round: int) -> None:
    """Send every row of metrics.jsonl as it appears, until standard input closes (which the end of the run does)."""
    for row in _new_rows(run_folder / METRICS):
        if row["round"] >= first_round:
            tracker.log(numbers_of(row, trl), row["round"])
    tracker.close()


def _new_rows(path: Path) -> Iterator[dict[str, Any]]:
    position, open_ = 0, True
    while open_:
        open_ = not select.select([sys.stdin], [], [], _POLL_SECONDS)[0]
        if not path.exists():
            continue
        with path.open("rb") as file:
            file.seek(position)
            data = file.read()
        whole = data.rfind(b"\n") + 1
        position += whole
        yield from map(decode_row, data[:whole].splitlines())


def main(words: Sequence[str]) -> int:
    """The process of one tracker: CHOICE RUN_FOLDER FIRST_ROUND."""
    name, *options = words[0].split(":")
    run_folder = Path(words[1])
    tracker = KINDS[name](run_folder, saved_settings(run_folder), "offline" in options)
    follow(tracker, run_folder, "trl" in options, int(words[2]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
