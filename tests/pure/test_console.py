"""What a person sees of a run: a live view on a terminal, plain lines elsewhere, JSON or next to nothing when asked."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from rich.console import Console as RichConsole

from cluster.run.console import Console
from cluster.run.findings import Finding
from cluster.run.inert import inert
from cluster.run.status import fleet_text, sparkline, status_lines

ROW = {"round": 1, "reward/correctness": 0.25, "reward/format": 0.5, "reward/total": 0.3, "time/round": 2.0}
FINDING = Finding("no-signal", "warning", 1, {"group/zero_signal": "0.9"}, "Groups agree.", "(1) Other prompts.")


def run_through(console: Console) -> None:
    """What a run of one round says."""
    console.line("round      8 responses = 1 prompt x 8")
    console.phase("generate", total=2, round_=1, lane="engines")
    console.advance(1, "groups, 40 tokens", "engines")
    console.row(ROW)
    console.finding(FINDING)
    console.rest("engines")
    console.close()
    console.always("1 round, 8 responses")


def test_elsewhere_than_on_a_terminal_there_are_plain_lines(capsys: pytest.CaptureFixture[str]) -> None:
    run_through(Console(quiet=False, log_json=False, rounds=4))
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        "round      8 responses = 1 prompt x 8",
        "round   1/4  correct 0.250  format 0.500  2.0 s",
        "warning: no-signal since round 1: Groups agree.",
        "1 round, 8 responses",
    ]


def test_quiet_keeps_findings_and_the_summary(capsys: pytest.CaptureFixture[str]) -> None:
    run_through(Console(quiet=True, log_json=False, rounds=4))
    lines = capsys.readouterr().out.splitlines()
    assert lines == ["warning: no-signal since round 1: Groups agree.", "1 round, 8 responses"]


def test_log_json_is_one_object_per_line_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    run_through(Console(quiet=False, log_json=True, rounds=4))
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [event["event"] for event in events] == ["line", "phase", "round", "finding", "summary"]
    assert events[2] == {"event": "round", **ROW}
    assert (events[3]["id"], events[3]["since_round"], events[3]["severity"]) == ("no-signal", 1, "warning")


class Terminal(io.StringIO):
    """A terminal that keeps what was written to it."""

    def isatty(self) -> bool:
        return True


def view(console: Console) -> str:
    """The live view as text."""
    paper = RichConsole(file=io.StringIO(), width=150, force_terminal=False)
    paper.print(console)
    text: Any = paper.file
    return str(text.getvalue())


def test_the_live_view_shows_progress_bars_fleet_and_findings(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr("sys.stdout", terminal)
    monkeypatch.setenv("TERM", "xterm")
    console = Console(quiet=False, log_json=False, rounds=4)
    console.states = lambda: {"engine-0": "healthy", "engine-1": "restarting", "learner-0": "healthy"}
    console.phase("generate", total=8, round_=1, lane="engines")
    console.phase("learn", total=4, round_=1, lane="learner")
    console.advance(3, "groups, 120 tokens", "engines")
    console.row(ROW)
    console.row(ROW | {"round": 2, "reward/correctness": 0.75, "eval/correctness": 0.5, "eval/format": 1.0})
    console.finding(FINDING)
    shown = view(console)
    console.close()
    assert "round 1/4  generate" in shown
    assert "3/8" in shown
    assert "round 1/4  learn" in shown
    assert "correct ▃▇ 0.750   reward ▃▃ 0.300   held-out ▅ 0.500" in shown
    assert "fleet: 1 engine healthy, engine-1 restarting, 1 rank healthy" in shown
    assert "found: warning no-signal since round 1" in shown
    assert "round   2/4" in terminal.getvalue()
    assert view(console) == "", "taken away"


def test_text_with_markup_or_escapes_is_shown_and_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr("sys.stdout", terminal)
    monkeypatch.setenv("TERM", "xterm")
    console = Console(quiet=False, log_json=False, rounds=1)
    console.always("[bold]row[/bold] \x1b]0;owned\x07 \x1b[2J")
    console.close()
    assert "[bold]row[/bold] \\x1b]0;owned\\x07 \\x1b[2J" in terminal.getvalue()
    assert "\x1b]0;owned" not in terminal.getvalue()
    assert "\x07" not in terminal.getvalue()


def test_what_a_terminal_might_obey_is_written_out_and_everything_else_stays() -> None:
    assert inert("a\x9b2J b\u202enihton\u202c c\u2028\ud800\r") == "a\\x9b2J b\\u202enihton\\u202c c\\u2028\\ud800\\r"
    assert inert("Größe 数学 ✓\tone\ntwo") == "Größe 数学 ✓\tone\ntwo"


def test_only_the_last_findings_are_named_and_the_others_counted() -> None:
    found = [("warning", "no-signal", 1), ("info", "plateau", 2), ("info", "stale", 3), ("critical", "reward-zero", 4)]
    (line,) = status_lines({}, {}, found)
    named = "info plateau since round 2; info stale since round 3; critical reward-zero since round 4"
    assert line == f"found: {named}; 1 before"
    assert status_lines({"reward": []}, {}, []) == []


def test_a_fleet_that_is_well_is_counted_and_what_is_not_is_named() -> None:
    assert fleet_text({"engine-0": "healthy", "engine-1": "healthy", "learner-0": "stale"}) == (
        "2 engines healthy, learner-0 stale"
    )
    assert fleet_text({}) == ""


def test_shares_are_drawn_from_0_to_1_and_other_rewards_from_their_lowest_to_their_highest() -> None:
    assert sparkline([0.0, 0.5, 1.0]) == "▁▅█"
    assert sparkline([-3.0, 0.0, 3.0]) == "▁▅█"
    assert sparkline([5.0, 5.0]) == "▁▁"
    assert sparkline([]) == ""
    assert len(sparkline([0.1] * 100)) == 24
