"""The report as a file: what it holds, what it cannot do, how large it gets. In a browser: test_report_browser.py."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
from pathlib import Path

import numpy as np
import pytest

from cluster.run.metrics import MetricsLog
from cluster.run.report import build_report
from cluster.run.report.charts import CHARTS, charts_for
from cluster.run.report.collect import RunRecord, limits_of, read_runs
from cluster.run.report.columns import MAX_POINTS, run_columns, wilson
from cluster.run.report.groups import FIELDS, choose_groups, choose_rounds, cut, index_round
from cluster.run.report.page import as_json_block, report_data
from cluster.run.saved_config import Difference, preset_differences, saved_settings
from cluster.run.series import Limits
from rollout.types import UserError
from tests.pure.synthetic_run_folder import HOSTILE, metrics_row, write_run


@pytest.fixture(scope="module")
def collapsed(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("runs") / "collapsed", rounds=80, collapse=45, seed=1, group_rounds=20)


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("runs") / "hostile", rounds=4, prompts=4, hostile=True)


def data_in(page: str):
    """The JSON block, found as a browser finds it: up to the first thing that ends a script."""
    start = page.index('<script type="application/json" id="data">') + len('<script type="application/json" id="data">')
    end = re.search(r"</script", page[start:], re.IGNORECASE)
    assert end is not None
    return json.loads(page[start : start + end.start()])


def test_the_report_is_one_file_that_asks_nothing_of_a_network(collapsed):
    file = build_report([collapsed])
    assert file == collapsed / "report.html"
    page = file.read_text("utf-8")
    head = page[: page.index("<script")]
    assert "default-src 'none'" in head
    assert not re.search(r"<(script|img|link|iframe)[^>]+(src|href)=", page[: page.index('id="data"')])
    assert not re.search(r"<script[^>]+src=", page)
    assert str(collapsed.parent) not in page


def test_only_scripts_that_the_page_names_may_run(collapsed):
    page = build_report([collapsed]).read_text("utf-8")
    allowed = re.findall(r"'sha256-([^']+)'", page[: page.index("<style>")])
    scripts = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    assert [base64.b64encode(hashlib.sha256(each.encode()).digest()).decode() for each in scripts] == allowed
    assert len(allowed) == len(set(allowed)) >= 5
    assert "unsafe-eval" not in page[: page.index("<style>")]


def test_text_of_a_model_cannot_leave_its_place_in_the_page(hostile):
    page = build_report([hostile]).read_text("utf-8")
    data = data_in(page)
    rounds = data["runs"][0]["groups"]["rounds"]
    responses = [values for each in rounds for group in each["groups"] for values in group["responses"]]
    shown = [values[FIELDS.index("text")] for values in responses]
    kept = [text.replace("\ud800", "\ufffd") for text in HOSTILE]
    assert set(shown) == set(kept)
    block = page[page.index('id="data">') + 10 : page.index("</script>")]
    assert block.isascii()
    assert not set(block) & set("<>&\x1b\u202e\u2028")
    assert "window.stolen" not in page.replace(block, "")


@pytest.mark.parametrize("text", ["</script>", "<!--<script>", "%SCRIPTS%", "]]>", "&quot;", "\u2028", "\ud800"])
def test_no_text_can_end_the_block_of_data(text):
    block = as_json_block({"text": text})
    assert json.loads(block) == {"text": text}
    assert not set(block) & set("<>&")
    assert block.isascii()


def test_a_prompt_that_looks_like_a_mark_of_the_template_is_left_alone(tmp_path):
    run = write_run(tmp_path / "run", rounds=2, prompts=1)
    (run / "plan.txt").write_text("%DATA% %SCRIPTS% %POLICY%")
    assert data_in(build_report([run]).read_text("utf-8"))["runs"][0]["plan"] == "%DATA% %SCRIPTS% %POLICY%"


@pytest.fixture
def no_sync(monkeypatch):
    """Thousands of rows need not survive a power cut here."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)
    monkeypatch.setattr(os, "fdatasync", lambda handle: None)


@pytest.mark.usefixtures("no_sync")
def test_a_thousand_rounds_of_long_responses_stay_small(tmp_path):
    run = write_run(tmp_path / "run", rounds=1000, prompts=4, size=16, group_rounds=60, words=500)
    file = build_report([run])
    assert file.stat().st_size < 10_000_000
    page = file.read_text("utf-8")
    assert "characters left out" in page
    groups = data_in(page)["runs"][0]["groups"]
    assert groups["kept_rounds"] > len(groups["rounds"]) == 48
    assert groups["rounds"][0]["round"] == 1
    assert all(each["groups"] for each in groups["rounds"])


def test_every_finding_is_in_the_report_with_what_it_was_seen_in(collapsed):
    (run,) = report_data(read_runs([collapsed]))["runs"]
    found = {each["id"]: each for each in run["findings"]}
    assert found["kl-takeover"]["severity"] == "critical"
    assert abs(found["kl-takeover"]["since"] - 45) <= 3
    charts = {key for chart in charts_for(run["columns"]) for key in chart["keys"]}
    assert set(found["kl-takeover"]["evidence"]) & charts


def test_the_round_in_which_something_began_can_be_browsed():
    assert choose_rounds(list(range(1, 1001)), [437, 5000], most=10)[0::9] == [1, 1000]
    assert 437 in choose_rounds(list(range(1, 1001)), [437, 5000], most=10)
    assert len(choose_rounds(list(range(1, 1001)), [437], most=10)) == 10
    assert choose_rounds([3, 5], [4], most=10) == [3, 5]


def test_best_worst_and_most_disputed_are_what_they_are_called(collapsed):
    index = index_round(1, collapsed / "groups/round-00001.parquet")
    chosen = choose_groups(index, most=4)
    by_tag: dict[str, int] = {}
    for at, tags in chosen.items():
        for tag in tags:
            by_tag.setdefault(tag, at)
    assert index.means[by_tag["best"]] == index.means.max()
    assert index.means[by_tag["worst"]] == index.means.min()
    assert index.spreads[by_tag["disputed"]] == index.spreads.max()
    assert len(choose_groups(index, most=100)) == len(index.rows)


def test_what_is_shown_of_a_group_is_what_was_kept(collapsed):
    from cluster.run.journal import read_round

    (run,) = report_data(read_runs([collapsed]))["runs"]
    shown = run["groups"]["rounds"][0]
    rows = {(row["row_id"], row["k"]): row for row in read_round(collapsed / shown["file"]).to_pylist()}
    for group in shown["groups"]:
        assert group["size"] == len(group["responses"]) == len(group["rewards"])
        for values in group["responses"]:
            response = dict(zip(FIELDS, values, strict=True))
            row = rows[group["row"], response["k"]]
            assert response["text"] == row["response"]
            assert response["total"] == pytest.approx(row["reward_total"], rel=1e-4)
            assert response["advantage"] == pytest.approx(row["advantage"], rel=1e-4)
            assert dict(zip(shown["parts"], response["parts"], strict=True)) == {
                "correctness": row["reward_correctness"],
                "format": row["reward_format"],
            }
            assert (response["length"], bool(response["finished"]), response["outcome"]) == (
                row["length"],
                row["finished"],
                row["outcome"],
            )


def test_the_same_prompt_is_followed_over_the_rounds(collapsed):
    (run,) = report_data(read_runs([collapsed]))["runs"]
    assert run["followed"]
    for prompt in run["followed"]:
        versions = [visit["version"] for visit in prompt["visits"]]
        assert len(versions) >= 2
        assert versions == sorted(set(versions))


def test_several_runs_stand_side_by_side_under_names_of_their_own(tmp_path):
    one = write_run(tmp_path / "a" / "run", rounds=6, prompts=2)
    two = write_run(tmp_path / "b" / "run", rounds=9, prompts=2, seed=1)
    file = build_report([one, two])
    assert file == tmp_path / "a" / "comparison.html"
    data = data_in(file.read_text("utf-8"))
    assert [run["name"] for run in data["runs"]] == ["a/run", "b/run"]
    assert ["rounds", "6", "9"] in data["settings"]
    assert ["learner.lr", "auto", "3e-06"] in data["settings"]
    assert all(name != "model" for name, *_ in data["settings"])
    assert build_report([one, two], tmp_path / "mine.html").exists()
    with pytest.raises(UserError, match="given twice"):
        build_report([one, one])


def test_a_run_that_has_only_begun_has_a_report_too(tmp_path):
    with MetricsLog(tmp_path) as log:
        log.append({"round": 0, "eval/correctness": 0.25})
    data = data_in(build_report([tmp_path]).read_text("utf-8"))
    assert data["runs"][0]["columns"]["eval/correctness"] == {"x": [0], "y": [0.25]}
    (tmp_path / "metrics.jsonl").write_text("")
    assert data_in(build_report([tmp_path]).read_text("utf-8"))["runs"][0]["columns"] == {}


def test_what_is_no_run_is_refused_with_what_to_give(tmp_path):
    with pytest.raises(UserError, match="no run directory"):
        build_report([tmp_path / "nowhere"])
    with pytest.raises(UserError, match="does not exist"):
        build_report([tmp_path])


def test_an_unwritable_place_leaves_the_old_report(collapsed, monkeypatch):
    file = build_report([collapsed])
    before = file.read_bytes()
    monkeypatch.setattr("cluster.run.report.page.render", lambda data: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        build_report([collapsed])
    assert file.read_bytes() == before


def test_every_metric_of_a_run_is_drawn_or_named_as_left_out(collapsed):
    (record,) = read_runs([collapsed])
    columns = run_columns(record)
    drawn = {key for chart in charts_for(columns) for key in chart["keys"]}
    assert set(columns) - drawn == {
        "weights_version",
        "responses",
        "tokens/generated",
        "sync/receipt_ok",
        "time/watch",
        "time/round",
    }


def test_a_metric_nobody_knows_gets_a_chart_of_its_own():
    charts = {chart["id"]: chart["keys"] for chart in charts_for(["reward/total", "reward/style", "mine/a", "mine/b"])}
    assert charts == {"reward": ["reward/total", "reward/style"], "further-mine": ("mine/a", "mine/b")}


def test_chart_names_are_unique():
    assert len({chart.id for chart in CHARTS}) == len(CHARTS)


def test_many_rounds_become_means_but_spikes_stay():
    rng = np.random.default_rng(0)
    rows = [metrics_row(rng, round_, 4500, 16, 8, None) for round_ in range(4501)]
    record = RunRecord("run", Path(), rows, [], {}, [], [], [], "", {})
    columns = run_columns(record)
    assert len(columns["policy/grad_norm"]["x"]) <= MAX_POINTS
    norms = [row["policy/grad_norm"] for row in rows[1:]]
    assert max(columns["policy/grad_norm"]["y"]) == pytest.approx(max(norms), rel=1e-4)
    lengths = [row["response/length"] for row in rows[1:]]
    assert np.mean(columns["response/length"]["y"]) == pytest.approx(np.mean(lengths), rel=1e-3)


def test_bands_narrow_with_the_number_of_prompts_and_hold_the_share():
    for share in (0.0, 0.3, 1.0):
        few, many = wilson(share, 10), wilson(share, 1000)
        assert few[0] <= many[0] <= share <= many[1] <= few[1]
    assert wilson(0.5, 100) == pytest.approx((0.4038, 0.5962), abs=1e-3)


def test_differences_from_the_preset_are_those_the_user_made(collapsed):
    settings = saved_settings(collapsed)
    assert settings["kl.kind"] == "k3"
    assert Difference("kl.kind", "none", "k3") in preset_differences(settings)
    changed = {each.name for each in preset_differences(settings)}
    assert "learner.clip_high" not in changed
    assert "minibatches" not in changed
    assert preset_differences({"preset": "r1"}) == []


def test_long_text_keeps_its_beginning_and_its_end():
    text = "a" * 500 + "b" * 500
    short = cut(text, 300)
    assert short.startswith("a" * 200 + "\n[... 700 characters left out ...]\n")
    assert short.endswith("b" * 100)
    assert cut(text, 1000) == text


def test_the_parts_of_the_page_travel_with_the_package():
    assets = Path(__file__).resolve().parents[2] / "cluster/run/report/assets"
    assert {each.name for each in assets.iterdir()} == {
        "page.html",
        "page.css",
        "text.js",
        "curves.js",
        "hover.js",
        "groups.js",
        "page.js",
    }


@pytest.mark.parametrize(
    ("settings", "lag"),
    [
        ({"cluster.schedule": "phased", "cluster.max_lag": 3}, 0),
        ({"cluster.schedule": "auto", "cluster.max_lag": 1}, 0),
        ({"cluster.schedule": "async", "cluster.max_lag": 3}, 3),
        ({}, Limits().max_lag),
    ],
)
def test_the_doctor_of_the_report_allows_as_much_lag_as_the_schedule_did(settings, lag):
    assert limits_of(settings).max_lag == lag
