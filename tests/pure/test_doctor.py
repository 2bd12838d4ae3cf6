"""The doctor on published logs, on synthetic failures and on healthy runs."""

from __future__ import annotations

import json
import math
import re
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.run.commands import doctor
from cluster.run.config import Config
from cluster.run.doctor import (
    Limits,
    diagnose,
    findings_as_json,
    findings_as_text,
    new_findings,
    skipped_rules,
    worst_severity,
)
from cluster.run.logs import read_log
from cluster.run.metric_table import metric_doc
from cluster.run.metrics import METRICS
from cluster.run.rules import all_rules
from cluster.run.saved_config import CONFIG
from tests.pure.synthetic_runs import FAILURES, blocks, book_like, failing, healthy

BOOK_LOGS = Path(__file__).parents[1] / "data" / "book_logs"
IDS = [
    *("kl-takeover", "kl-runaway", "reward-collapse", "reward-zero", "entropy-explosion", "entropy-collapse"),
    *("format-hacked", "length-explosion", "length-collapse", "all-truncated", "no-signal", "clip-saturation"),
    *("ratio-explosion", "grad-spike", "grad-growth", "lr-too-high", "mismatch-growing", "stale", "eval-gap"),
    *("plateau", "loss-zero-by-construction"),
]


def ids(rows: Any, severity: str | None = None) -> set[str]:
    return {finding.id for finding in diagnose(rows) if severity in (None, finding.severity)}


def rows_of(**columns: Any) -> list[dict[str, Any]]:
    """Rows from columns; `stage__what` stands for `stage/what`, a number for the same value in every round."""
    count = max(len(column) for column in columns.values() if not isinstance(column, int | float))
    rows: list[dict[str, Any]] = [{"round": at + 1} for at in range(count)]
    for name, column in columns.items():
        for at, row in enumerate(rows):
            row[name.replace("__", "/")] = column if isinstance(column, int | float) else float(column[at])
    return rows


def test_every_finding_of_the_contract_has_a_rule_and_there_is_no_other() -> None:
    assert sorted(rule.id for rule in all_rules()) == sorted(IDS) == sorted(FAILURES)


def test_the_published_kl_run_is_named_with_the_round_in_which_rewards_ended() -> None:
    findings = diagnose(read_log(BOOK_LOGS / "kl_term_run.csv").rows)
    takeover = next(finding for finding in findings if finding.id == "kl-takeover")
    assert takeover.severity == "critical"
    assert abs(takeover.since_round - 58) <= 3
    assert {"entropy-explosion", "reward-collapse", "grad-growth", "all-truncated"} <= {each.id for each in findings}


def test_the_published_kl_run_is_caught_live_within_fifteen_rounds() -> None:
    rows = read_log(BOOK_LOGS / "kl_term_run.csv").rows
    assert "kl-takeover" not in ids(rows[:55])
    assert "kl-takeover" in ids(rows[:72], "critical")


def test_nothing_is_critical_in_the_published_clipped_run_at_any_time() -> None:
    rows = read_log(BOOK_LOGS / "clipped_ratio_run.csv").rows
    silent = sum(row["advantage/std"] == 0 for row in rows) / len(rows)
    assert silent > 0.6
    for count in [*range(1, 60), *range(60, 501, 20)]:
        assert worst_severity(diagnose(rows[:count])) in (None, "info"), count


@pytest.mark.parametrize("name", IDS)
def test_at_least_95_percent_of_30_noisy_runs_with_a_failure_are_found(name: str) -> None:
    cases = [(seed, single) for seed in range(15) for single in (False, True)]
    missed = [case for case in cases if name not in ids(failing(name, *case)[0])]
    assert len(missed) <= 0.05 * len(cases), missed


def test_at_most_1_of_100_healthy_runs_has_a_critical_finding() -> None:
    cases = [(seed, single) for seed in range(100, 150) for single in (False, True)]
    false = [case for case in cases if ids(healthy(*case), "critical")]
    assert len(false) <= 1, false


@pytest.mark.parametrize("single", [False, True])
@pytest.mark.parametrize("rounds", [1, 2, 3])
def test_nothing_is_critical_in_the_first_rounds_of_healthy_runs(single: bool, rounds: int) -> None:
    for seed in range(20):
        assert not ids(healthy(seed, single, rounds), "critical"), seed


@pytest.mark.parametrize("single", [False, True])
def test_a_healthy_run_is_free_of_critical_findings_after_every_round(single: bool) -> None:
    for seed in range(3):
        rows = healthy(seed, single, 40)
        for count in range(1, len(rows) + 1):
            assert not ids(rows[:count], "critical"), (seed, count)


@pytest.mark.parametrize("name", ["kl-takeover", "reward-collapse", "mismatch-growing", "stale", "clip-saturation"])
def test_the_round_of_a_sudden_failure_is_told_within_a_tenth_of_the_run(name: str) -> None:
    for seed in range(8):
        rows, begins = failing(name, seed)
        since = next(finding.since_round for finding in diagnose(rows) if finding.id == name)
        assert abs(since - begins) <= max(4, 0.25 * len(rows)), (seed, since, begins)


# The book's other published runs, after the window means that are known of them (their logs are not kept here).


def test_entropy_and_reward_are_named_in_a_run_without_clip_and_kl() -> None:
    accuracy = blocks([0.58, 0.6, 0.56, 0.55, 0.5, 0.125, 0.4, 0.45, 0.45, 0.4], 50)
    entropy = blocks([0.21, 0.3, 0.4, 0.7, 1.17, 7.2, 3, 2, 2, 2], 50)
    evals = [0.156, 0.462, 0.434, 0.428, 0.442, 0.412, 0.37, 0.38, 0.38, 0.336, 0.33]
    for seed in range(5):
        findings = {finding.id: finding for finding in diagnose(book_like(seed, 500, accuracy, entropy, evals=evals))}
        assert findings["entropy-explosion"].severity == "critical"
        assert 200 <= findings["entropy-explosion"].since_round <= 275
        assert "reward-collapse" in findings


@pytest.mark.parametrize(
    ("weight", "levels", "form", "evals"),
    [
        (
            1.0,
            [0.634, 0.439, 0.482, 0.527, 0.395],
            (0.62, 0.93),
            [0.508, 0.562, 0.548, 0.458, 0.322, 0.35, 0.094, 0.284, 0.296, 0.176, 0.35],
        ),
        (
            0.1,
            [0.677, 0.339, 0.311, 0.384, 0.444],
            (0.65, 0.95),
            [0.508, 0.556, 0.572, 0.33, 0.268, 0.266, 0.278, 0.282, 0.288, 0.334, 0.298],
        ),
    ],
)
def test_format_is_named_where_it_rises_and_correctness_falls(
    weight: float, levels: list[float], form: tuple[float, float], evals: list[float]
) -> None:
    entropy = np.interp(np.arange(500), [0, 150, 300, 500], [0.25, 0.5, 3.4, 2.0])
    for seed in range(5):
        rows = book_like(
            seed, 500, blocks(levels, 100), entropy, form=np.linspace(*form, 500), weight=weight, evals=evals
        )
        assert {"format-hacked", "entropy-explosion"} <= ids(rows, "critical"), seed
        assert weight < 1 or "eval-gap" in ids(rows), seed


def test_a_conditional_format_reward_that_falls_with_correctness_is_not_called_hacked() -> None:
    accuracy = blocks([0.649, 0.364, 0.144, 0.32, 0.41], 100)
    entropy = np.interp(np.arange(500), [0, 150, 300, 500], [0.25, 1.5, 7.6, 2.0])
    for seed in range(5):
        rows = book_like(seed, 500, accuracy, entropy, form=np.zeros(500), conditional=True)
        assert "format-hacked" not in ids(rows)
        assert {"reward-collapse", "entropy-explosion"} <= ids(rows, "critical")


def test_zero_rewards_are_only_critical_once_enough_responses_have_earned_nothing() -> None:
    single = rows_of(reward__total=np.zeros(30), responses=8)
    many = rows_of(reward__total=np.zeros(3), responses=8192)
    assert "reward-zero" not in ids(single[:5])
    assert "reward-zero" in ids(single[:10], "warning")
    assert "reward-zero" in ids(single, "critical")
    assert "reward-zero" in ids(many[:2], "warning")
    assert "reward-zero" in ids(many, "critical")


def test_a_part_of_the_reward_that_is_always_zero_is_named() -> None:
    rows = rows_of(reward__total=np.linspace(0.2, 0.6, 6), reward__format=np.zeros(6), responses=8192)
    finding = next(finding for finding in diagnose(rows) if finding.id == "reward-zero")
    assert finding.severity == "warning"
    assert "reward/format" in finding.evidence
    assert "format" in finding.cause


@pytest.mark.parametrize(
    ("key", "values", "said"),
    [
        ("reward__format", [0.0, 0.0], True),  # huggingface/trl#6966, huggingface/open-r1#560
        ("reward__format", [0.0], False),
        ("reward__format", [0.0, 0.01], False),
        ("reward__brevity", [0.0, 0.0], True),
        ("reward__brevity", [0.3, 0.2, 0.0, 0.0], False),
        ("reward__brevity", [0.3, 0.2, 0.0, 0.0, 0.0, 0.0], True),
        ("reward__brevity", [0.3, 0.0, 0.2, 0.0, 0.0, 0.0, 0.0], False),
        ("reward__overlong", [0.0, 0.0, 0.0], False),
    ],
)
def test_a_part_that_pays_nobody_for_two_rounds_is_a_warning(key: str, values: list[float], said: bool) -> None:
    n = len(values)
    rows = rows_of(reward__total=np.full(n, 0.4), reward__correctness=np.full(n, 0.4), responses=64, **{key: values})
    findings = [finding for finding in diagnose(rows) if finding.id == "reward-zero"]
    assert [finding.severity for finding in findings] == ["warning"] * said
    if said:
        assert "rounds running" in findings[0].evidence[key.replace("__", "/")]


def test_a_solved_task_without_spread_is_no_failure() -> None:
    rows = rows_of(
        reward__correctness=np.full(12, 0.99),
        reward__total=np.full(12, 0.99),
        group__zero_signal=np.full(12, 0.97),
        policy__entropy=np.linspace(0.8, 0.01, 12),
        policy__kl=np.linspace(0.0, 0.1, 12),
        responses=8192,
    )
    assert ids(rows) == {"no-signal"}
    assert worst_severity(diagnose(rows)) == "info"


def test_long_answers_that_become_right_are_no_length_explosion() -> None:
    rows = rows_of(
        response__length=np.linspace(200, 2000, 40),
        response__truncated=np.linspace(0.01, 0.08, 40),
        reward__correctness=np.linspace(0.2, 0.8, 40),
        responses=8192,
    )
    assert "length-explosion" not in ids(rows)


def test_lag_is_judged_against_the_bound_of_the_run() -> None:
    rows = [{"round": n, "weights_version": max(0, n - 3)} for n in range(1, 20)]
    assert {finding.id for finding in diagnose(rows, Limits(max_lag=1))} == {"stale"}
    assert not diagnose(rows, Limits(max_lag=2))


@pytest.mark.parametrize(("schedule", "allowed", "stale"), [("async", 3, False), ("async", 1, True), ("auto", 3, True)])
@pytest.mark.parametrize("given", ["", METRICS])
def test_the_command_judges_lag_by_the_bound_of_the_run_it_is_given(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], given: str, schedule: str, allowed: int, stale: bool
) -> None:
    (tmp_path / CONFIG).write_text(f'[cluster]\nschedule = "{schedule}"\nmax_lag = {allowed}\n')
    rows = [{"round": n, "weights_version": max(0, n - 4)} for n in range(1, 20)]
    (tmp_path / METRICS).write_text("".join(json.dumps(row) + "\n" for row in rows))
    code = doctor([str(tmp_path / given), "--fail-on", "critical"])
    assert (code != 0) == stale
    assert ("up to 3 versions behind" in capsys.readouterr().out) == stale


def test_a_failed_receipt_is_stale_weights() -> None:
    rows = [{"round": n, "weights_version": n - 1, "sync/receipt_ok": n != 3} for n in range(1, 5)]
    finding = diagnose(rows)[0]
    assert (finding.id, finding.severity, finding.since_round) == ("stale", "critical", 3)


def test_steps_that_were_not_finite_are_named_at_once() -> None:
    rows = rows_of(policy__grad_norm=[1.0, math.nan, 1.0], policy__skipped_steps=[0, 1, 0])
    finding = next(finding for finding in diagnose(rows) if finding.id == "grad-spike")
    assert finding.since_round == 2
    assert {"policy/grad_norm", "policy/skipped_steps"} == set(finding.evidence)


def test_ln_v_is_told_when_the_vocabulary_is_known() -> None:
    rows = rows_of(policy__entropy=[0.5] * 10 + [8.0] * 10)
    finding = next(each for each in diagnose(rows, Limits(vocabulary=151936)) if each.id == "entropy-explosion")
    assert "11.9" in finding.evidence["policy/entropy"]


def test_rules_without_their_metrics_are_skipped_and_say_what_they_need() -> None:
    rows = rows_of(policy__entropy=np.full(20, 0.5))
    skipped = {each.id: each.missing for each in skipped_rules(rows)}
    assert set(IDS) - set(skipped) == {"entropy-explosion", "entropy-collapse"}
    assert skipped["format-hacked"] == ("reward/correctness", "reward/format")
    assert skipped["kl-runaway"] == ("policy/kl or policy/kl_loss",)
    assert "reward/format" in findings_as_text([], skipped_rules(rows))


def test_rules_need_only_metrics_that_are_documented() -> None:
    assert not [name for rule in all_rules() for keys in rule.needs for name in keys if metric_doc(name) is None]


def flags(config: type, prefix: str = "--") -> set[str]:
    names: set[str] = set()
    hints = get_type_hints(config)
    for each in fields(config):
        word = prefix + each.name.replace("_", "-")
        names |= flags(hints[each.name], word + ".") if is_dataclass(hints[each.name]) else {word}
    return names


def test_every_flag_that_a_finding_recommends_exists() -> None:
    known = flags(Config)
    texts = [text for rule in all_rules() for text in (rule.cause, rule.cure)]
    named = {flag for text in texts for flag in re.findall(r"--[a-z][a-z0-9.-]*[a-z0-9]", text)}
    assert len(named) > 20
    assert named <= known, sorted(named - known)


@pytest.mark.parametrize("rule", all_rules(), ids=lambda rule: rule.id)
def test_every_rule_says_why_in_a_sentence_or_two_and_what_to_do_in_order(rule: Any) -> None:
    assert rule.cause.endswith(".")
    assert 1 <= rule.cause.count(". ") + 1 <= 3
    assert rule.cure.startswith("(1) ")
    numbers = [int(number) for number in re.findall(r"\((\d)\) ", rule.cure)]
    assert numbers == list(range(1, len(numbers) + 1))


def test_findings_are_written_for_people_and_for_programs() -> None:
    findings = diagnose(read_log(BOOK_LOGS / "kl_term_run.csv").rows)
    text = findings_as_text(findings)
    document = json.loads(findings_as_json(findings, skipped_rules([])))
    assert text.index("CRITICAL  kl-takeover, since round 58") < text.index("WARNING")
    assert set(document["findings"][0]) == {"id", "severity", "since_round", "evidence", "cause", "cure"}
    assert [each["id"] for each in document["findings"]] == [each.id for each in findings]
    assert len(document["skipped"]) == len(IDS)
    assert findings_as_text([]).startswith("Nothing found")


def test_only_what_is_new_or_has_become_worse_is_announced() -> None:
    rows = read_log(BOOK_LOGS / "kl_term_run.csv").rows
    before, now = diagnose(rows[:62]), diagnose(rows[:75])
    fresh = {finding.id for finding in new_findings(before, now)}
    assert "kl-takeover" in fresh
    assert "entropy-explosion" not in fresh
    assert new_findings(now, now) == []


def test_no_rows_make_no_findings() -> None:
    assert diagnose([]) == []


def test_the_order_of_rows_does_not_matter() -> None:
    rows, _ = failing("entropy-explosion", 3)
    assert diagnose(rows) == diagnose(rows[::-1])


values = st.one_of(
    st.none(),
    st.booleans(),
    st.text(max_size=3),
    st.floats(allow_nan=True, allow_infinity=True, width=64),
    st.integers(-(10**6), 10**6),
)
KEYS = sorted({name for rule in all_rules() for keys in rule.needs for name in keys} | {"responses", "reward/odd"})


@settings(max_examples=60, deadline=None)
@given(st.lists(st.dictionaries(st.sampled_from(KEYS), values, max_size=8), max_size=40))
def test_whatever_the_rows_hold_the_doctor_answers(rows: list[dict[str, Any]]) -> None:
    with np.errstate(all="ignore"):
        findings = diagnose(rows)
    findings_as_text(findings, skipped_rules(rows))
    json.loads(findings_as_json(findings))


# Logs of other systems, whose rewards and units are not ours.


def test_rewards_of_minus_one_and_one_that_rise_are_no_failure(tmp_path: Path) -> None:
    draw = np.random.default_rng(5)
    totals = -0.96 + 0.9 * (1 - np.exp(-np.arange(300) / 150)) + draw.normal(0, 0.03, 300)
    lengths = np.linspace(1000, 4000, 300)
    columns = {"critic/score/mean": totals, "response_length/mean": lengths, "actor/entropy": np.full(300, 0.4)}
    log = read_log(written(tmp_path, columns))
    assert "(total + 1) / 2" in log.notes[-1]
    assert not [finding for finding in diagnose(log.rows) if finding.severity != "info"]
    fallen = columns | {"critic/score/mean": np.where(np.arange(300) < 200, totals, -0.99 + 0 * totals)}
    assert "reward-collapse" in ids(read_log(written(tmp_path, fallen)).rows, "critical")


def test_rewards_that_are_costs_may_shrink_and_may_not_grow(tmp_path: Path) -> None:
    draw = np.random.default_rng(6)
    costs = -(20 + 380 * np.exp(-np.arange(120) / 25)) * draw.lognormal(0, 0.08, 120)
    assert not ids(read_log(written(tmp_path, {"reward": costs})).rows, "critical")
    assert "reward-collapse" in ids(read_log(written(tmp_path, {"reward": costs[::-1].copy()})).rows, "critical")


def test_answers_that_are_all_wrong_from_the_start_are_named_where_a_wrong_one_costs_something() -> None:
    rows = rows_of(reward__total=np.full(30, -1.0), responses=256)
    assert "reward-zero" in ids(rows, "critical")


def test_one_prompt_per_round_is_told_by_rounds_with_and_without_spread_taking_turns(tmp_path: Path) -> None:
    for seed in range(10):
        draw = np.random.default_rng([seed, 3])
        right = draw.random((300, 8)) < draw.beta(0.3, 0.3, 300)[:, None]
        rewards = np.where(right, 1.0, -1.0)
        kl = 1e-4 * np.arange(1, 301) * draw.lognormal(0, 0.5, 300)
        columns = {"reward": rewards.mean(1), "reward_std": rewards.std(1), "kl": kl}
        log = read_log(written(tmp_path, columns))
        assert not ids(log.rows, "critical"), seed


@pytest.mark.parametrize("prompts", [2, 3, 4])
def test_a_few_prompts_per_round_are_as_noisy_as_one(prompts: int, tmp_path: Path) -> None:
    for seed in range(10):
        draw = np.random.default_rng([seed, prompts])
        level = np.linspace(0.3, 0.7, 200)[:, None]
        right = draw.random((200, prompts, 8)) < draw.beta(level, 1 - level, (200, prompts))[..., None]
        columns = {
            "rewards/accuracy_reward/mean": right.mean((1, 2)),
            "frac_reward_zero_std": (right.std(2) == 0).mean(1),
            "completions/clipped_ratio": draw.binomial(8 * prompts, 0.05, 200) / (8 * prompts),
            "completions/mean_length": 300 * draw.lognormal(0, 0.25, 200),
            "entropy": 0.5 * draw.lognormal(0, 0.3, 200),
        }
        assert not ids(read_log(written(tmp_path, columns)).rows, "critical"), seed


def test_a_format_part_that_pays_half_a_point_can_be_hacked_too(tmp_path: Path) -> None:
    draw = np.random.default_rng(8)
    t = np.arange(300)
    right = draw.binomial(64, 0.5 * np.exp(-t / 80)) / 64
    form = 0.5 * draw.binomial(64, 0.05 + 0.93 * (1 - np.exp(-t / 40))) / 64
    columns = {"rewards/correctness_reward_func/mean": 2 * right, "rewards/soft_format_reward_func/mean": form}
    assert "format-hacked" in ids(read_log(written(tmp_path, columns | {"reward": 2 * right + form})).rows, "critical")


def test_every_part_of_a_reward_is_looked_at_under_its_own_name(tmp_path: Path) -> None:
    columns = {
        "rewards/soft_format_reward_func/mean": np.linspace(0.1, 0.4, 40),
        "rewards/strict_format_reward_func/mean": np.zeros(40),
        "reward": np.linspace(0.1, 0.5, 40),
    }
    finding = next(each for each in diagnose(read_log(written(tmp_path, columns)).rows) if each.id == "reward-zero")
    assert list(finding.evidence) == ["reward/strict_format_reward_func"]


def written(folder: Path, columns: dict[str, np.ndarray]) -> Path:
    count = len(next(iter(columns.values())))
    rows = [{"step": at + 1} | {name: float(values[at]) for name, values in columns.items()} for at in range(count)]
    path = folder / "log.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_policy_that_is_lost_in_the_first_round_is_named_by_its_evaluations():
    held_out = [0.207, 0.023, 0.016, 0.016, 0.002, 0.006, 0.004]  # seed 1 of the lesson on clipping, without the clip
    rows = [{"round": 2 * at, "eval/correctness": value} for at, value in enumerate(held_out)]
    trained = [0.234, 0.097, 0.023, 0.062, 0.029, 0.013, 0.018, 0.014, 0.001, 0.009, 0.008, 0.010]
    for number, value in enumerate(trained, 1):
        row = {"reward/correctness": value, "reward/total": value, "responses": 1024, "group/count": 64}
        rows = [r for r in rows if r["round"] != number] + [
            {"round": number} | row | next((r for r in rows if r["round"] == number), {})
        ]
    rows.sort(key=lambda row: row["round"])
    (finding,) = [found for found in diagnose(rows) if found.id == "reward-collapse"]
    assert (finding.severity, finding.since_round) == ("critical", 2)
    rows[-1]["eval/correctness"] = 0.2  # it came back
    assert not [found for found in diagnose(rows) if found.id == "reward-collapse" and found.severity == "critical"]
