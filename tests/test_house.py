"""The rules of the house (ARCHITECTURE.md, CONTRIBUTING.md) that a machine can keep."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
OURS = ("launch", "rollout", "learner", "cluster")
SOURCES = sorted(
    path.relative_to(ROOT)
    for path in [ROOT / "launch.py", *(file for folder in OURS[1:] for file in (ROOT / folder).rglob("*.py"))]
)

MAY_IMPORT = {
    "launch": {"rollout", "learner", "cluster"},
    "cluster": {"rollout", "learner", "cluster"},
    "learner": {"learner"},  # and rollout.types
    "rollout": {"rollout"},
}
DOORS = {
    "ray": ("launch.py", "cluster/"),
    "vllm": ("rollout/engine.py", "rollout/weights.py"),
    "deepspeed": ("learner/engine.py", "learner/weights.py", "learner/checkpoint.py"),
}
HEAVY = {"torch", "vllm", "ray", "deepspeed", "transformers", "pyarrow", "pandas", "datasets"}


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse((ROOT / path).read_text(), filename=str(path))


def dotted(node: ast.expr) -> str:
    """`a.b.c` for an attribute chain, `` for anything else."""
    match node:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=value, attr=attr):
            return f"{dotted(value)}.{attr}"
        case _:
            return ""


def imports(module: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and dotted name of everything a file imports, wherever it does it, and also by name at run time."""
    for node in ast.walk(module):
        match node:
            case ast.Import(names=names):
                yield from ((node.lineno, alias.name) for alias in names)
            case ast.ImportFrom(level=0, module=str(source), names=names):
                yield from ((node.lineno, f"{source}.{alias.name}") for alias in names)
            case ast.Call(func=func, args=[ast.Constant(value=str(name)), *_]):
                if dotted(func).endswith(("import_module", "__import__")):
                    yield node.lineno, name


def broken_laws(path: Path, module: ast.Module) -> list[str]:
    """What the file imports against the import law."""
    home = path.parts[0].removesuffix(".py")
    broken = []
    for line, name in imports(module):
        package = name.split(".")[0]
        allowed = package in MAY_IMPORT[home] or (home == "learner" and name.startswith("rollout.types."))
        if package in OURS and not allowed:
            broken.append(f"{path}:{line}: {home} may not import {name}")
        if package in DOORS and not str(path).startswith(DOORS[package]):
            broken.append(f"{path}:{line}: {package} may be imported only in {', '.join(DOORS[package])}")
    return broken


def tracked_files() -> list[Path]:
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("not a git checkout: no list of tracked files")
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    return [Path(name) for name in listing.stdout.split("\0") if name and (ROOT / name).is_file()]


# --- Who may import what ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", SOURCES, ids=str)
def test_a_file_imports_only_what_the_import_law_allows(path: Path) -> None:
    broken = broken_laws(path, tree(path))
    assert not broken, "\n".join(broken)


@pytest.mark.parametrize(
    ("path", "code"),
    [
        ("rollout/prompts.py", "import cluster.plan"),
        ("rollout/prompts.py", "def late():\n    from learner.types import Batch"),
        ("learner/update.py", "from rollout import seeds"),
        ("learner/update.py", "from rollout.config import RolloutConfig"),
        ("learner/update.py", "import deepspeed"),
        ("rollout/scoring.py", "import importlib\nimportlib.import_module('ray.util')"),
        ("cluster/actors.py", "from vllm import LLM"),
        ("cluster/plan.py", "import launch"),
    ],
)
def test_the_import_law_notices(path: str, code: str) -> None:
    assert len(broken_laws(Path(path), ast.parse(code))) == 1


@pytest.mark.parametrize("path", SOURCES, ids=str)
def test_imports_are_absolute(path: Path) -> None:
    relative = [node.lineno for node in ast.walk(tree(path)) if isinstance(node, ast.ImportFrom) and node.level]
    assert not relative, f"{path}: relative imports in lines {relative}"


def test_every_wait_on_ray_is_in_the_one_file_that_gives_waits_a_deadline() -> None:
    waits = [
        f"{path}:{node.lineno}: {dotted(node.func)}"
        for path in SOURCES
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Call) and dotted(node.func) in ("ray.get", "ray.wait")
        if path != Path("cluster/waiting.py")
    ]
    assert not waits, "\n".join(waits)


def test_actors_are_declared_in_one_file() -> None:
    declared = {
        str(path)
        for path in SOURCES
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Attribute) and dotted(node) == "ray.remote"
    }
    assert declared == {"cluster/actors.py"}


# --- What is light stays light ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words", [["--help"], ["plan", "--help"], ["plan", "--rollouts", "64"], ["presets"]], ids=" ".join
)
def test_no_heavy_library_is_loaded_to_answer(words: list[str]) -> None:
    code = f"""
import sys, launch
try:
    code = launch.main({words!r})
except SystemExit as end:
    code = end.code
print("loaded:", *sorted({HEAVY!r} & sys.modules.keys()))
sys.exit(code)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].split() == ["loaded:"]


def test_importing_launch_loads_only_the_standard_library() -> None:
    code = "import sys, launch; print(*sorted({m.split('.')[0] for m in sys.modules} - sys.stdlib_module_names))"
    done = subprocess.run(
        [sys.executable, "-I", "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r}); {code}"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    foreign = {name for name in done.stdout.split() if not name.startswith(("_", "sitecustomize", "distutils"))}
    assert foreign <= {"launch", "cluster"}, "launch.py must start under any Python, to hand over to the one in .venv"


# --- Names ------------------------------------------------------------------------------------------------------------


def test_no_file_is_named_for_having_no_subject() -> None:
    nameless = {"utils", "util", "helpers", "helper", "common", "misc"}
    found = [path for path in SOURCES if nameless & {path.stem, *path.parts[:-1]}]
    found += [p for p in (ROOT / "tests").rglob("*.py") if p.stem in nameless]
    assert not found


def test_no_class_is_a_manager() -> None:
    found = [
        f"{path}:{node.lineno}: {node.name}"
        for path in SOURCES
        for node in ast.walk(tree(path))
        if isinstance(node, ast.ClassDef) and re.search(r"(Manager|Controller|Orchestrator|Helper)$", node.name)
    ]
    assert not found


def test_tests_are_no_package() -> None:
    assert not list((ROOT / "tests").rglob("__init__.py"))


def test_every_package_folder_is_one() -> None:
    without = {path.parent for path in SOURCES if path.parent != Path()} - {
        path.parent for path in SOURCES if path.name == "__init__.py"
    }
    assert not without, "these folders would be left out of other people's tools: no __init__.py"


# --- Documents --------------------------------------------------------------------------------------------------------


def drawn_tree() -> dict[str, str]:
    """Path -> what ARCHITECTURE.md says about it, from the block that begins with launch.py (two spaces per level)."""
    blocks = re.findall(r"^```[a-z]*\n(launch\.py.*?)^```", (ROOT / "ARCHITECTURE.md").read_text(), re.M | re.S)
    assert len(blocks) == 1, "ARCHITECTURE.md draws the tree in one code block that begins with launch.py"
    drawn: dict[str, str] = {}
    folders: list[str] = []
    for line in filter(str.strip, blocks[0].splitlines()):
        name, _, text = line.strip().partition(" ")
        depth, rest = divmod(len(line) - len(line.lstrip()), 2)
        assert rest == 0, f"ARCHITECTURE.md: odd indentation of {line!r}"
        assert depth <= len(folders), f"ARCHITECTURE.md: {line!r} lies under no folder"
        del folders[depth:]
        drawn["".join(folders) + name] = text.strip()
        if name.endswith("/"):
            folders.append(name)
    return drawn


def test_architecture_draws_every_source_file_and_no_other() -> None:
    drawn = drawn_tree()
    missing = [str(p) for p in SOURCES if str(p) not in drawn and p.name != "__init__.py"]
    gone = [name for name in drawn if not (ROOT / name).exists()]
    mute = [name for name, text in drawn.items() if not text]
    assert not missing, f"not in the tree of ARCHITECTURE.md: {missing}"
    assert not gone, f"in the tree of ARCHITECTURE.md, but not here: {gone}"
    assert not mute, f"no line about it in ARCHITECTURE.md: {mute}"


DOCUMENTS = sorted(path.relative_to(ROOT) for path in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
PATH_IN_TEXT = re.compile(r"`((?:rollout|learner|cluster|tests|docs|requirements|\.ci)/[\w./-]+)`")


@pytest.mark.parametrize("document", DOCUMENTS, ids=str)
def test_every_path_a_document_names_exists(document: Path) -> None:
    named = set(PATH_IN_TEXT.findall((ROOT / document).read_text()))
    assert not [name for name in named if not (ROOT / name).exists()]


@pytest.mark.parametrize("document", DOCUMENTS, ids=str)
def test_every_link_between_documents_leads_somewhere(document: Path) -> None:
    links = re.findall(r"\]\((?!\w+:|#)([^)#\s]+)", (ROOT / document).read_text())
    assert not [link for link in links if not (ROOT / document.parent / link).exists()]


# --- What must not be in the repository -------------------------------------------------------------------------------


# Written so that they do not find themselves.
FOREIGN = {
    "a path of somebody's machine": re.compile(
        r"(?<![\w.$~{}<>/-])/(?:" + "|".join(("work", "opt", "root", "home", "Users")) + r")/\w"
    ),
    "the host of a package registry": re.compile(r"pypi[.]org|python[h]osted|download[.]pytorch|npm[j]s[.]org"),
}


def test_no_tracked_file_names_a_machine_or_a_registry() -> None:
    found = []
    for path in tracked_files():
        content = (ROOT / path).read_bytes()
        if b"\0" in content:
            continue
        for number, line in enumerate(content.decode(errors="replace").splitlines(), start=1):
            found += [
                f"{path}:{number}: {what}: {line.strip()[:120]}" for what, sign in FOREIGN.items() if sign.search(line)
            ]
    assert not found, "\n".join(found)


def test_nothing_heavy_is_tracked() -> None:
    large = [
        f"{path}: {(ROOT / path).stat().st_size} bytes"
        for path in tracked_files()
        if (ROOT / path).stat().st_size > 2_000_000
    ]
    assert not large


@pytest.mark.parametrize("script", ["setup.sh", ".ci/run", "requirements/repin.sh"])
def test_scripts_can_be_run_and_parsed(script: str) -> None:
    path = ROOT / script
    assert path.stat().st_mode & 0o111, f"{script} is not executable"
    subprocess.run(["bash", "-n", str(path)], check=True)
