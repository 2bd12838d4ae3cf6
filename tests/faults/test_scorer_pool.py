"""The pool of grading processes under bad answers and bad rewards. Real processes, no Ray."""

from __future__ import annotations

import dataclasses
import math
import os
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from cluster.errors import PlanError, RemoteFailure
from cluster.reward_check import check_reward, require_sound_reward
from cluster.scorer_pool import ScorerPool
from rollout.config import RewardConfig
from rollout.rewards.selftest import HARD_ANSWER
from rollout.types import UserError
from tests.pure.graded_responses import SCORING, make_group, make_prompt

pytestmark = pytest.mark.faults

HANGING = r"\int_0^{\infty} \frac{\sin(x^3)\ln(x+1)^2}{x^7+\sqrt{x}+1} dx"
MEMORY_BOMB = r"\lim_{y \to 0} (x+y+1)^{3000}"  # about a gigabyte of polynomials within seconds
TOWER = r"\dfrac{5^{\left(5^{\left(5^{\left(5^5\right)}\right)}-4\right)}-5}{16}"
QUICK = RewardConfig(deadline=2.0, memory_mb=256)


def boxed(answer: str) -> str:
    return f"\\boxed{{{answer}}}"


def good(number: int):
    """A group that math-verify has to be asked about, and quickly says right."""
    return make_group([boxed(f"\\gcd({2 * number}, {4 * number})")], str(2 * number))


@pytest.fixture
def pool():
    pools = []

    def start(config: RewardConfig = QUICK, reward: str = "") -> ScorerPool:
        pools.append(ScorerPool(config, dataclasses.replace(SCORING, reward_function=reward)))
        return pools[-1]

    yield start
    pids = [pid for each in pools for pid in each.pids]
    for each in pools:
        each.close()
    assert gone(pids)


def gone(pids: list[int]) -> bool:
    """Whether none of the processes runs any more, within a few seconds."""
    deadline = time.monotonic() + 10
    while any(map(is_running, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not any(map(is_running, pids))


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.fixture
def reward(tmp_path: Path):
    def write(body: str) -> str:
        path = tmp_path / "mine.py"
        path.write_text("import os, time, signal, asyncio\nimport numpy as np\n\n" + body)
        return f"{path}:reward"

    return write


def warm(pool: ScorerPool) -> None:
    pool.submit(good(1))
    assert [scored.outcomes for scored in pool.drain()] == [("right",)]


def test_plain_answers_start_no_process(pool):
    scorer = pool()
    began = time.monotonic()
    for _ in range(100):
        scorer.submit(make_group(["<think>a</think>132<eos>", "<think>a</think>133<eos>"] * 8))
    assert time.monotonic() - began < 1.0
    assert len(scorer.ready()) == 100
    assert scorer.pids == []
    assert scorer.counts.responses == 1600


def test_a_hundred_good_answers_are_not_held_up_by_a_hanging_one_and_a_memory_bomb(pool):
    scorer = pool(RewardConfig(deadline=120.0, memory_mb=256))
    warm(scorer)
    for number in range(2, 12):
        scorer.submit(good(number))
    scorer.submit(make_group([boxed(HANGING)], "1"))
    scorer.submit(make_group([boxed(MEMORY_BOMB)], "x+1"))
    for number in range(12, 102):
        scorer.submit(good(number))
    results = {}
    for scored in scorer.drain():
        results[scored.group.texts[0]] = (scored.outcomes, scored.timeouts)
        if len(results) == 101:
            break
    # Both workers had a bad answer, and still everything but the hanging one came back long before its deadline.
    assert results.pop(boxed(MEMORY_BOMB)) == (("wrong",), 1)
    assert list(results.values()) == [(("right",), 0)] * 100
    assert scorer.counts.errors == 0


def test_one_bad_answer_in_a_group_costs_one_deadline_and_its_siblings_nothing(pool):
    scorer = pool()
    texts = [boxed(r"\gcd(4, 8)"), boxed(HANGING), "\\boxed{4}", boxed(TOWER), boxed("5"), boxed(HANGING)]
    scorer.submit(make_group(texts, "4"))
    (scored,) = scorer.drain()
    assert scored.outcomes == ("right", "wrong", "right", "wrong", "wrong", "wrong")
    assert scored.timeouts == 3  # the tower would have run into the deadline: it was never evaluated
    assert scorer.counts.refused == 1
    assert scorer.counts.asked == 2  # the same answer is asked about once
    assert scored.total.tolist() == [1, 0, 1, 0, 0, 0]


def test_three_hanging_answers_before_ten_good_ones_leave_a_whole_pool(pool):
    """areal-project/AReaL#1426: hung items kept the processes of the pool for ever."""
    scorer = pool()
    for number in range(3):
        scorer.submit(make_group([boxed(f"{HANGING} + {number}")], "1"))
    for number in range(2, 12):
        scorer.submit(good(number))
    outcomes = [scored.outcomes[0] for scored in scorer.drain()]
    assert sorted(outcomes) == ["right"] * 10 + ["wrong"] * 3
    warm(scorer)


def test_degenerate_answers_of_any_length_are_wrong_within_the_deadline(pool):
    """verl-project/verl#6673."""
    scorer = pool()
    began = time.monotonic()
    texts = ["a" * 200_000, boxed("9" * 200_000), boxed("x+" * 100_000), boxed("{" * 100_000), boxed(TOWER)]
    scorer.submit(make_group(texts, "7", ids=[[9]] * 5))
    (scored,) = scorer.drain()
    assert scored.outcomes == ("wrong",) * 5
    assert time.monotonic() - began < 2.0 + 2 * QUICK.deadline


def test_scoring_works_from_any_thread(pool):
    """verl-project/verl#5635 and huggingface/trl#5281: all rewards were 0 off the main thread."""
    scorer = pool()
    outcomes: list[tuple[str, ...]] = []

    def work() -> None:
        scorer.submit(make_group([boxed(r"\gcd(4, 6)"), boxed(r"\gcd(9, 6)")], "2"))
        outcomes.extend(scored.outcomes for scored in scorer.drain())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(60)
    assert outcomes == [("right", "wrong")]


def test_code_in_an_answer_does_nothing_in_the_processes_either(pool, tmp_path):
    scorer = pool()
    path = tmp_path / "canary"
    codes = [
        f"__import__('os').system('touch {path}')",
        f"open('{path}', 'w')",
        f"\\sum_{{k=1}}^{{open('{path}','w')}} k",
    ]
    scorer.submit(make_group([boxed(code) for code in codes], r"\gcd(4, 6)"))
    (scored,) = scorer.drain()
    assert scored.outcomes == ("wrong",) * 3
    assert not path.exists()


def test_a_killed_grading_process_costs_no_verdict(pool):
    scorer = pool()
    warm(scorer)
    for pid in scorer.pids[:-1]:
        os.kill(pid, signal.SIGKILL)
    for number in range(2, 8):
        scorer.submit(good(number))
    assert [scored.outcomes for scored in scorer.drain()] == [("right",)] * 6


def test_a_killed_nursery_is_replaced(pool):
    scorer = pool()
    warm(scorer)
    os.kill(scorer.pids[-1], signal.SIGKILL)
    time.sleep(0.2)
    for number in range(2, 8):
        scorer.submit(good(number))
    assert [scored.outcomes for scored in scorer.drain()] == [("right",)] * 6


def test_a_stopped_process_is_replaced_at_the_deadline(pool):
    scorer = pool()
    warm(scorer)
    for pid in scorer.pids[:-1]:
        os.kill(pid, signal.SIGSTOP)
    scorer.submit(good(2))
    scorer.submit(good(3))
    began = time.monotonic()
    outcomes = sorted(scored.outcomes[0] for scored in scorer.drain())
    assert outcomes.count("right") >= 1  # at most the item that the stopped process had is lost
    assert time.monotonic() - began < 2 * QUICK.deadline + 10
    warm(scorer)


def test_cut_responses_are_never_graded(pool):
    scorer = pool()
    scorer.submit(make_group([boxed("132"), boxed(HANGING)], finished=[False, False]))
    (scored,) = scorer.ready()
    assert scored.outcomes == ("wrong", "wrong")
    assert scored.total.tolist() == [0, 0]


def test_a_users_function_gets_responses_without_end_tokens(pool, reward):
    scorer = pool(reward=reward("def reward(response, answer):\n    return response.endswith('</think>' + answer)\n"))
    scorer.submit(make_group(["<think>a</think>132<eos>", "<think>a</think>1132<eos>"]))
    (scored,) = scorer.drain()
    assert scored.outcomes == ("right", "wrong")
    assert scored.parts["correctness"].tolist() == [1, 0]
    assert scored.total.tolist() == pytest.approx([1.1, 0.1])


def test_parts_without_correctness_stand_beside_the_built_in_one(pool, reward):
    scorer = pool(reward=reward("def reward(responses):\n    return {'brevity': [-len(r) / 100 for r in responses]}\n"))
    scorer.submit(make_group([boxed("132"), boxed(r"\gcd(4, 6)"), "7"]))
    scorer.submit(make_group([boxed(r"\gcd(4, 6)")], "2"))
    first, second = sorted(scorer.drain(), key=lambda scored: -len(scored.outcomes))
    assert first.outcomes == ("right", "wrong", "wrong")
    assert second.outcomes == ("right",)
    assert list(first.parts) == ["correctness", "format", "brevity"]
    assert first.total.tolist() == pytest.approx([1 - 0.11, -0.18, -0.01])


def test_trl_functions_get_whole_groups(pool, reward):
    body = "def reward(completions, answer, **kw):\n    return [float(a in c) for c, a in zip(completions, answer)]\n"
    scorer = pool(reward=reward(body))
    for _ in range(3):
        scorer.submit(make_group(["132", "133"]))
    assert [scored.outcomes for scored in scorer.drain()] == [("right", "wrong")] * 3


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("def reward(response):\n    if response == '7': raise KeyError('why')\n    return 1.0\n", "KeyError: 'why'"),
        ("def reward(response):\n    if response == '7': os._exit(3)\n    return 1.0\n", "its process died"),
        ("def reward(response):\n    if response == '7': raise SystemExit(3)\n    return 1.0\n", "SystemExit: 3"),
        ("def reward(response):\n    if response == '7': os.kill(os.getpid(), 11)\n    return 1.0\n", "process died"),
        ("def reward(response):\n    return None if response == '7' else 1.0\n", "returned None, not a number"),
        ("def reward(response):\n    return float('nan') if response == '7' else 1.0\n", "returned nan, not a number"),
        ("def reward(response):\n    x = 'x' * (2**30 if response == '7' else 1)\n    return 1.0\n", "MemoryError"),
    ],
    ids=["raises", "exits", "system-exit", "crashes", "none", "nan", "memory"],
)
def test_a_fault_of_the_users_function_is_an_error_and_the_group_says_so(pool, reward, body, reason):
    scorer = pool(reward=reward(body))
    scorer.submit(make_group(["132", "7", "132"]))
    scorer.submit(make_group(["132", "132"]))
    first, second = sorted(scorer.drain(), key=lambda scored: -len(scored.outcomes))
    assert first.outcomes == ("right", "error", "right")
    assert first.errors == 1
    assert np.isnan(first.total[1])
    assert second.outcomes == ("right", "right")
    assert reason in scorer.last_error
    assert "mine.py:reward" in scorer.last_error
    assert "row row-1, response 1" in scorer.last_error
    assert scorer.counts.errors == 1


def test_an_answer_that_hangs_a_users_function_is_wrong_and_counted(pool, reward):
    body = "def reward(response):\n    time.sleep(60 if response == '7' else 0)\n    return 1.0\n"
    scorer = pool(RewardConfig(deadline=0.5), reward(body))
    scorer.submit(make_group(["132", "7", "132"]))
    (scored,) = scorer.drain()
    assert scored.outcomes == ("right", "wrong", "right")
    assert scored.timeouts == 1
    assert scored.parts["correctness"].tolist() == [1, 0, 1]


def test_async_judges_run_together_and_a_slow_one_costs_its_own_response(pool, reward):
    body = "async def reward(response):\n    await asyncio.sleep(60 if response == '7' else 0.3)\n    return 1.0\n"
    scorer = pool(RewardConfig(deadline=1.0), reward(body))
    scorer.submit(make_group(["132"] * 15 + ["7"]))
    began = time.monotonic()
    (scored,) = scorer.drain()
    assert scored.outcomes == ("right",) * 15 + ("wrong",)
    assert time.monotonic() - began < 8.0


def test_what_async_functions_compute_between_their_waits_has_a_deadline_per_response(pool, reward):
    body = "async def reward(response):\n    await asyncio.sleep(0)\n    time.sleep(0.3)\n    return 1.0\n"
    scorer = pool(RewardConfig(deadline=0.6), reward(body))
    scorer.submit(make_group(["132"] * 8))
    (scored,) = scorer.drain()
    assert scored.outcomes == ("right",) * 8


def test_a_function_that_hangs_on_everything_is_an_error_before_long(pool, reward):
    scorer = pool(RewardConfig(deadline=0.2), reward("def reward(response):\n    time.sleep(60)\n"))
    for number in range(12):
        scorer.submit(make_group(["1"], prompt=make_prompt(row_id=f"row-{number}")))
    outcomes = [scored.outcomes[0] for scored in scorer.drain()]
    assert outcomes[0] == "wrong"
    assert outcomes[-1] == "error"
    assert "items in a row failed" in scorer.last_error


def test_a_whole_group_that_hangs_is_an_error_of_the_function(pool, reward):
    scorer = pool(RewardConfig(deadline=0.2), reward("def reward(responses):\n    time.sleep(60)\n"))
    scorer.submit(make_group(["1", "2"]))
    (scored,) = scorer.drain()
    assert scored.outcomes == ("error", "error")
    assert "no verdict within" in scorer.last_error


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("def reward(completions, **kw):\n    return [1.0]\n", "returned 1 values for row row-1, expected 8"),
        ("def reward(text):\n    return 1.0\n", "cannot be told what it wants"),
        ("def reward(response, solution):\n    return 1.0\n", "asks for solution"),
        ("raise RuntimeError('no')\n", "importing it failed: RuntimeError: no"),
        ("def other(response):\n    return 1.0\n", "has no function 'reward'"),
        ("n = 0\ndef reward(response):\n    global n\n    n += 1\n    return {f'p{n}': 1.0}\n", "gave the parts p2"),
    ],
)
def test_a_broken_contract_ends_the_run_with_a_message_for_the_user(pool, reward, body, message):
    """huggingface/trl#6533."""
    scorer = pool(reward=reward(body))
    scorer.submit(make_group(["x"] * 8))
    with pytest.raises(UserError, match=message):
        list(scorer.drain())
    with pytest.raises(UserError, match=message):
        scorer.ready()


def test_prints_and_reads_of_a_users_function_do_not_disturb_the_pool(pool, reward):
    body = (
        "import sys\n\ndef reward(response):\n    print('{\"parts\": []}' * 1000)\n    os.write(1, b'x' * 100)\n"
        "    return len(sys.stdin.read()) + 1.0\n"
    )
    scorer = pool(reward=reward(body))
    scorer.submit(make_group(["a", "b"]))
    assert [scored.outcomes for scored in scorer.drain()] == [("right", "right")]


def test_a_process_that_a_users_function_started_does_not_outlive_its_deadline(pool, reward, tmp_path):
    child = tmp_path / "child"
    body = (
        "import subprocess\n\ndef reward(response):\n    child = subprocess.Popen(['sleep', '60'])\n"
        f"    open('{child}', 'w').write(str(child.pid))\n    child.wait()\n    return 1.0\n"
    )
    scorer = pool(RewardConfig(deadline=0.5), reward(body))
    scorer.submit(make_group(["a"]))
    (scored,) = scorer.drain()
    assert scored.timeouts == 1
    assert gone([int(child.read_text())])


def test_large_inputs_do_not_block_the_pool(pool, reward):
    scorer = pool(
        RewardConfig(deadline=5.0), reward("def reward(responses):\n    return [len(r) for r in responses]\n")
    )
    scorer.submit(make_group(["a" * 3_000_000] * 4, ids=[[9]] * 4))
    (scored,) = scorer.drain()
    assert scored.parts["correctness"].tolist() == [3_000_000] * 4


def test_nothing_is_left_when_the_driver_is_killed(reward):
    body = "def reward(response):\n    time.sleep(60)\n    return 1.0\n"
    read, write = os.pipe()
    child = os.fork()
    if child == 0:  # a driver of its own, killed below
        os.close(read)
        scorer = ScorerPool(RewardConfig(deadline=50.0), dataclasses.replace(SCORING, reward_function=reward(body)))
        scorer.submit(make_group(["a"]))
        while not scorer.pids:
            time.sleep(0.05)
        time.sleep(1.0)
        os.write(write, " ".join(map(str, scorer.pids)).encode())
        time.sleep(60)
        os._exit(0)
    pids = [int(pid) for pid in os.read(read, 1000).split()]
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert pids
    assert gone(pids)


def test_memory_of_the_driver_stays_flat_over_many_bad_answers(pool):
    scorer = pool(RewardConfig(deadline=0.3))
    warm(scorer)
    before = len(os.listdir("/proc/self/fd"))
    for number in range(6):
        scorer.submit(make_group([boxed(f"{HARD_ANSWER} + {number}")], "1"))
    assert [scored.outcomes for scored in scorer.drain()] == [("wrong",)] * 6
    warm(scorer)
    assert len(os.listdir("/proc/self/fd")) <= before + 12  # a few processes more, nothing of those that were killed


def test_closing_twice_and_with_work_left_is_fine(pool):
    scorer = pool()
    scorer.submit(make_group([boxed(HANGING)], "1"))
    scorer.close()
    scorer.close()


def test_a_drain_that_nothing_comes_out_of_says_so(pool, reward):
    scorer = pool(RewardConfig(deadline=30.0), reward("def reward(response):\n    time.sleep(20)\n    return 1.0\n"))
    scorer.submit(make_group(["a"]))
    with pytest.raises(RemoteFailure, match="1 groups were not scored"):
        list(scorer.drain(deadline=0.5))


def test_check_reward_says_what_would_be_paid_and_finds_a_reward_that_pays_for_nothing(reward):
    spec = reward("def reward(response, answer):\n    return 1.0 if answer in response or not response else 0.0\n")
    check = check_reward(QUICK, dataclasses.replace(SCORING, reward_function=spec), [make_prompt()])
    assert check.is_critical
    assert check.findings[0].id == "empty-paid"
    assert "right, no format" in check.as_text()


def test_check_reward_passes_the_built_in_one_and_handles_the_answer_no_grader_finishes():
    check = check_reward(QUICK, SCORING, [make_prompt("132"), make_prompt(r"\gcd(4, 6)", "row-2")], thorough=True)
    assert check.findings == ()
    assert len(check.tables) == 2


def test_a_run_does_not_start_with_a_reward_that_fails_its_self_test(reward):
    scoring = dataclasses.replace(SCORING, reward_function=reward("def reward(response):\n    return 1.0\n"))
    with pytest.raises(PlanError, match="empty-paid"):
        require_sound_reward(QUICK, scoring, [make_prompt()])


def test_a_module_that_knows_its_right_responses_is_asked(reward):
    body = (
        "def reward(response, answer):\n    return float(response.endswith(f'RESULT={answer}'))\n\n"
        "def right_response(answer, **row):\n    return f'RESULT={answer}'\n"
    )
    check = check_reward(QUICK, dataclasses.replace(SCORING, reward_function=reward(body)), [make_prompt()])
    assert not check.is_critical
    assert not math.isnan(sum(len(table) for table in check.tables))
