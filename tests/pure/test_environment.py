"""`python launch.py` under any interpreter ends up in .venv, or says in one line what to run."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import cluster.run.environment as environment

ROOT = Path(environment.__file__).resolve().parents[2]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout with a launch.py that tells who runs it and with what, and no .venv yet."""
    package = tmp_path / "cluster" / "run"
    package.mkdir(parents=True)
    (tmp_path / "cluster" / "__init__.py").touch()
    (package / "__init__.py").touch()
    shutil.copy(environment.__file__, package)
    (tmp_path / "setup.sh").touch()
    (tmp_path / "launch.py").write_text(
        "import os, sys\n"
        "from cluster.run import environment\n"
        "environment.REQUIRED = ('a_package_nobody_has',)\n"
        "environment.ensure_environment(sys.argv[1:])\n"
        "print(sys.prefix, *sys.argv[1:], 'ROLLEARN_SWITCHED_INTERPRETER' in os.environ)\n"
    )
    return tmp_path


def with_venv(checkout: Path, *, complete: bool) -> Path:
    """Adds a .venv without the cost of pip; `complete`: with the package that is needed."""
    venv = checkout / ".venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True, timeout=60)
    if complete:
        (next((venv / "lib").glob("python*/site-packages")) / "a_package_nobody_has.py").touch()
    return venv


def launch(checkout: Path, *words: str, python: str = sys.executable) -> subprocess.CompletedProcess[str]:
    # Without PYTHONPATH and the like: the folder of launch.py alone decides what is imported.
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return subprocess.run(
        [python, "launch.py", *words], cwd=checkout, env=env, capture_output=True, text=True, timeout=60, check=False
    )


def test_the_interpreter_of_the_venv_takes_over_with_the_same_arguments(checkout: Path) -> None:
    venv = with_venv(checkout, complete=True)
    done = launch(checkout, "--rollouts", "8", "two words")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(venv), "--rollouts", "8", "two", "words", "False"]


def test_a_complete_interpreter_stays(checkout: Path) -> None:
    venv = with_venv(checkout, complete=True)
    done = launch(checkout, python=str(venv / "bin" / "python"))
    assert done.stdout.split() == [str(venv), "False"]


def test_without_a_venv_one_line_says_what_to_run(checkout: Path) -> None:
    done = launch(checkout)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert "a_package_nobody_has not found" in done.stderr
    assert f"run ./setup.sh in {checkout}" in done.stderr


@pytest.mark.parametrize("inside", [False, True])
def test_a_venv_that_was_left_half_made_is_no_loop(checkout: Path, inside: bool) -> None:
    venv = with_venv(checkout, complete=False)
    done = launch(checkout, python=str(venv / "bin" / "python") if inside else sys.executable)
    assert done.returncode == 2
    assert done.stderr.count("run ./setup.sh") == 1


def test_an_installed_copy_says_which_extra_to_install(tmp_path: Path) -> None:
    assert "rollearn[cpu]" in environment.missing_environment_message(["vllm"], tmp_path)


def test_what_is_required_is_what_the_tests_run_with() -> None:
    assert environment.missing_packages(environment.REQUIRED) == []
    assert environment.missing_packages(["json", "a_package_nobody_has"]) == ["a_package_nobody_has"]
