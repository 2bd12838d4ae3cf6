"""What there is to plan with: this machine, or the Ray cluster at `--cluster.address`. Loads no heavy library."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

from cluster.errors import PlanError
from cluster.resources import Node, Resources, local_resources, sum_of

SURVEY_SECONDS = 40.0
CONNECT_SECONDS = 5.0
SOURCE = Path(__file__).resolve().parents[1]


def resources_at(address: str) -> Resources:
    """Of this machine, or of all nodes of a cluster; PlanError when that cannot be reached within 40 s."""
    if not address:
        return local_resources()
    refuse_open_cluster(address)
    if why := _silent(address):
        raise PlanError(_unreachable(address, why))
    environment = os.environ | {"RAY_AUTH_MODE": "token", "RAY_USAGE_STATS_ENABLED": "0"}
    try:
        survey = subprocess.run(
            [sys.executable, "-m", "cluster.survey", address],
            cwd=SOURCE,
            env=environment,
            capture_output=True,
            text=True,
            timeout=SURVEY_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise PlanError(_unreachable(address, f"no answer within {SURVEY_SECONDS:g} s")) from None
    lines = [line for line in survey.stdout.splitlines() if line.startswith("[{")]
    if survey.returncode or not lines:
        errors = [line.strip() for line in survey.stderr.splitlines() if line.strip()]
        raise PlanError(_unreachable(address, errors[-1] if errors else f"exit code {survey.returncode}"))
    return sum_of([Node(**node) for node in json.loads(lines[-1])])


def refuse_open_cluster(address: str) -> None:
    """PlanError for a cluster without tokens."""
    if address and os.environ.get("RAY_AUTH_MODE") == "disabled":
        raise PlanError(
            f"--cluster.address {address} with RAY_AUTH_MODE=disabled: anybody who reaches that cluster could run code "
            f"on it.\n  Start the cluster with a token (ray get-auth-token --generate) and unset RAY_AUTH_MODE."
        )


def _silent(address: str) -> str:
    """Why nobody answers at host:port, or nothing; Ray itself would go on trying for a minute."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        return ""
    try:
        socket.create_connection((host, int(port)), CONNECT_SECONDS).close()
    except OSError as error:
        return f"{error}"
    return ""


def _unreachable(address: str, why: str) -> str:
    return (
        f"--cluster.address {address}: this Ray cluster cannot be joined ({why}).\n"
        f"  Is it up (ray status), is this machine one of its nodes (ray start --address ...), and is its token here "
        f"(RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH or ~/.ray/auth_token)?"
    )
