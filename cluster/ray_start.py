"""Ray comes up: a private one on this machine, or a cluster that is joined."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import ray

from cluster.errors import RemoteFailure
from cluster.plan import Plan
from cluster.run.config import Config
from cluster.run.folder import RunFolder


def start_ray(config: Config, plan: Plan, folder: RunFolder, temp: Path) -> None:
    """Start a private Ray in `temp` (cluster/private.py), or join `--cluster.address`."""
    options: dict[str, Any] = {"address": config.cluster.address}
    if not config.cluster.address:
        options = {
            "address": "local",
            "num_cpus": plan.engines + plan.ranks,
            "include_dashboard": False,
            "_temp_dir": str(temp),
        }
    ours = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        ray.init(
            log_to_driver=False,
            logging_level="ERROR",
            configure_logging=False,
            runtime_env={"working_dir": str(folder.code)},
            **options,
        )
    except Exception as error:  # Ray raises plain Exception where its processes do not come up
        where = f"join the cluster at {config.cluster.address}" if config.cluster.address else "start on this machine"
        raise RemoteFailure(
            f"Ray could not {where}: {error}\n  Ray gives its processes 30 s: on a machine that is busy with other "
            f"work, the same command may well succeed later."
        ) from error
    finally:
        # Ray has put a handler for SIGTERM in place that aborts the process (exit -6): what was there comes back.
        for each, handler in ours.items():
            signal.signal(each, handler)
