"""Finds the interpreter that has the heavy libraries, before anything else is imported.

`python launch.py` is typed with whatever Python is at hand, ./setup.sh installs into .venv. Only the standard library
is used here, and nothing newer than Python 3.7, so that an old interpreter gets the message and not a syntax error.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path

REQUIRED = ("vllm", "ray", "deepspeed", "torch", "transformers", "pyarrow", "tyro", "rich")
"""What a run cannot do without; finding them is enough here, importing them would take seconds."""

_ALREADY_SWITCHED = "ROLLEARN_SWITCHED_INTERPRETER"
_MISSING_ENVIRONMENT = 2


def missing_packages(names: Sequence[str]) -> list[str]:
    """Those of the packages that this interpreter cannot find."""
    return [name for name in names if importlib.util.find_spec(name) is None]


def missing_environment_message(missing: Sequence[str], root: Path) -> str:
    """One line that says what is missing for whom, and what to type."""
    if (root / "setup.sh").exists():
        cure = f"run ./setup.sh in {root}"
    else:
        cure = "install rollearn[cpu] or rollearn[gpu] (see README.md)"
    return f"{', '.join(missing)} not found for {sys.executable}: {cure}"


def ensure_environment(argv: Sequence[str]) -> None:
    """Return when this interpreter has all it takes, else start launch.py again with the one in .venv, or exit 2.

    `argv` holds the arguments behind the name of the program. The environment variable that guards against a loop is
    taken away again, so that programs started by the run see the environment the user gave.
    """
    switched = os.environ.pop(_ALREADY_SWITCHED, None) is not None
    missing = missing_packages(REQUIRED)
    if not missing:
        return
    root = Path(__file__).resolve().parents[2]
    venv = root / ".venv"
    python = venv / "bin" / "python"
    # The python of a virtual environment is a link to the one it was made with: only the prefix tells them apart.
    is_running = Path(sys.prefix).resolve() == venv.resolve()
    if not switched and not is_running and os.access(python, os.X_OK):
        os.environ[_ALREADY_SWITCHED] = "1"
        sys.stdout.flush()
        sys.stderr.flush()
        os.execv(python, [str(python), str(root / "launch.py"), *argv])
    sys.stderr.write(missing_environment_message(missing, root) + "\n")
    sys.exit(_MISSING_ENVIRONMENT)
