"""docs/metrics.md, the table behind it, and the code that writes metrics say the same."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from cluster.run.metric_table import METRICS, metric_doc, metrics_page
from cluster.run.rules import all_rules

ROOT = Path(__file__).parents[2]
CONTRACT = [
    "round", "weights_version", "responses", "tokens/generated", "reward/total", "reward/correctness", "reward/format",
    "reward/std", "group/zero_signal", "response/length", "response/truncated", "policy/loss", "policy/entropy",
    "policy/ratio_mean", "policy/ratio_max", "policy/clip_fraction_low", "policy/clip_fraction_high",
    "policy/clip_fraction_dual", "policy/kl", "policy/kl_loss", "policy/grad_norm", "policy/lr",
    "policy/skipped_steps", "advantage/mean", "advantage/std", "correction/weight_mean", "correction/weight_max",
    "mismatch/mean", "mismatch/max", "sync/seconds", "sync/receipt_ok", "dropped/<reason>", "grader/timeouts",
    "grader/errors", "fleet/restarts", "eval/correctness", "eval/format", "eval/pass@k", "time/generate", "time/score",
    "time/learn", "time/old_logprobs", "time/eval", "time/round", "memory/<process>", "steps",
]  # fmt: skip
STAGES = "|".join(sorted({doc.name.split("/")[0] for doc in METRICS if "/" in doc.name}))
METRIC = re.compile(rf"(?:{STAGES})/[a-z_@*]+")
NOT_IN_ROWS = {"aliases.py", "report"}  # names of other systems, and figures that the report computes from rows


def metrics_named_in(path: Path) -> set[str]:
    """Every string of a source file that reads like a metric; `*` stands where an f-string puts a value."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        text = node.value if isinstance(node, ast.Constant) else None
        if isinstance(node, ast.JoinedStr):
            text = "".join(str(part.value) if isinstance(part, ast.Constant) else "*" for part in node.values)
        if isinstance(text, str) and METRIC.fullmatch(text) and not text.endswith("@"):
            names.add(text.replace("@*", "@4").replace("*", "any"))
    return names


def test_every_metric_of_the_contract_is_in_the_table() -> None:
    assert set(CONTRACT) <= {doc.name for doc in METRICS}


def test_every_metric_is_described_in_full_and_once() -> None:
    assert len({doc.name for doc in METRICS}) == len(METRICS)
    for doc in METRICS:
        assert all((doc.formula, doc.unit, doc.healthy, doc.otherwise)), doc.name


def test_every_metric_that_the_code_names_is_in_the_table() -> None:
    sources = [path for folder in ("cluster", "learner", "rollout") for path in (ROOT / folder).rglob("*.py")]
    named = {name: path for path in sources if not NOT_IN_ROWS & set(path.parts) for name in metrics_named_in(path)}
    assert len(named) > 30
    assert {name: str(path) for name, path in named.items() if metric_doc(name) is None} == {}


def test_every_finding_that_the_table_names_is_a_finding_of_the_doctor() -> None:
    named = {name for doc in METRICS for name in re.findall(r"`([a-z]+(?:-[a-z]+)*)`", doc.otherwise)}
    assert named <= {rule.id for rule in all_rules()}
    assert {rule.id for rule in all_rules()} <= named


def test_the_page_is_the_table() -> None:
    page = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    assert page == metrics_page(), "write it anew: python -m cluster.run.metric_table > docs/metrics.md"


@pytest.mark.parametrize(
    ("name", "doc"),
    [
        ("reward/format", "reward/format"),
        ("reward/brevity", "reward/<part>"),
        ("dropped/no_signal", "dropped/<reason>"),
        ("eval/pass@8", "eval/pass@k"),
        ("memory/engine 0", "memory/<process>"),
    ],
)
def test_a_name_of_a_row_is_found_by_its_pattern(name: str, doc: str) -> None:
    found = metric_doc(name)
    assert found is not None
    assert found.name == doc


def test_unknown_names_have_no_description() -> None:
    assert metric_doc("policy/unheard_of") is None
    assert metric_doc("eval/pass@many") is None
