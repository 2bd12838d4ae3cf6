"""Ray: a signal that comes while the driver waits for a task ends the wait, SIGTERM as well as SIGINT."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import os, signal, sys, threading, time
import ray
from cluster.run.signals import handled

ray.init(address="local", num_cpus=1, include_dashboard=False, logging_level="error", _temp_dir=sys.argv[1])

@ray.remote
def nap():
    time.sleep(60)

endless = nap.remote()
for wait in (ray.get, lambda ref: ray.wait([ref], timeout=30)):
    for number in (signal.SIGINT, signal.SIGTERM):
        with handled(lambda _: os._exit(1), grace=60.0) as received:
            threading.Timer(0.5, os.kill, (os.getpid(), number)).start()
            began = time.monotonic()
            try:
                wait(endless)
            except KeyboardInterrupt:
                print(signal.Signals(received[0]).name, "ended the wait" if time.monotonic() - began < 15 else "late")
"""


def test_a_signal_ends_a_wait_for_a_task() -> None:
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as place:  # short: Ray's sockets lie below it
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, place], cwd=ROOT, capture_output=True, text=True, timeout=180, check=False
        )
    assert done.stdout.splitlines() == ["SIGINT ended the wait", "SIGTERM ended the wait"] * 2, done.stderr
