"""What holds for all tests: markers follow the folder, and tests for a GPU say why they are left out."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from hypothesis import settings

# A busy machine makes any single example slow once in a while; how long tests take is measured elsewhere. The same
# examples in every run: a gate must not fail by the luck of the draw (look for new ones with --hypothesis-seed).
settings.register_profile("house", deadline=None, derandomize=True)
settings.load_profile("house")

TESTS = Path(__file__).resolve().parent
MARKED_FOLDERS = ("system", "faults", "gpu")


def has_gpu() -> bool:
    """Whether the driver lists one; a machine without a GPU may have the program too."""
    try:
        listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60, check=False)
    except OSError:
        return False
    return listing.stdout.startswith("GPU ")


@pytest.fixture(scope="session")
def demo_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small run of the default path that nothing disturbs, for all that look at one: to be read, not changed."""
    from tests.faults.runs import DEMO_RUN, launch

    run = tmp_path_factory.mktemp("runs") / "demo"
    ended = launch(*DEMO_RUN, "--trace-round", "2", "--run", str(run))
    assert ended.code == 0, ended.text
    assert "held-out accuracy" in ended.text
    return run


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give every test below a marked folder the marker of its name."""
    for item in items:
        folder = item.path.relative_to(TESTS).parts[0]
        if folder in MARKED_FOLDERS:
            item.add_marker(folder)
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if on_gpu and not has_gpu():
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason="needs a GPU, and nvidia-smi lists none"))
