"""tests/gpu/run.py on a machine without a GPU: a part that fails or hangs is shown, and takes no other with it."""

from __future__ import annotations

import importlib.util
import time
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).resolve().parents[1] / "gpu" / "run.py"


@pytest.fixture
def script() -> Any:
    spec = importlib.util.spec_from_file_location("gpu_run", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_parts_that_pass_fail_and_hang_stand_in_the_table_with_their_figures(script: Any, tmp_path: Path) -> None:
    (tmp_path / "test_parts.py").write_text(
        "import json, os, subprocess, time\n"
        "def test_passes():\n"
        "    line = json.dumps({'what': 'speed of light', 'value': 299792.458, 'unit': 'km/s'})\n"
        "    open(os.environ['ROLLEARN_GPU_FIGURES'], 'a').write(line + '\\n')\n"
        "def test_fails():\n"
        "    assert 'this' == 'that'\n"
        "def test_hangs():\n"
        f"    subprocess.Popen(['sh', '-c', 'sleep 6; touch {tmp_path}/survivor'])\n"
        "    time.sleep(60)\n"
    )
    words = [str(tmp_path / "test_parts.py"), "--rootdir", str(tmp_path), "-p", "no:cacheprovider", "-k"]
    began = time.monotonic()
    results = [script._run(name, [*words, name], 4 if name == "hangs" else 60) for name in ("passes", "fails", "hangs")]
    assert [result["outcome"] for result in results] == ["passed", "FAILED", "HUNG"]
    text = script.table(["GPU 0: one of them"], results)
    assert "speed of light" in text
    assert "2.998e+05 km/s" in text
    assert "assert 'this' == 'that'" in text
    assert all(what in text for what in script.NEEDS_TWO)
    time.sleep(max(0.0, began + 12 - time.monotonic()))
    assert not (tmp_path / "survivor").exists(), "what a hung part has started is ended with it"


def test_its_parts_fit_into_ten_minutes(script: Any) -> None:
    assert sum(limit for _, _, limit in script.PARTS) <= 600
    for _, words, _ in script.PARTS:
        assert (SCRIPT.parents[2] / words[0]).is_file()
