"""The demo: its problems, its split, its tokenizer and its model directory."""

from __future__ import annotations

import dataclasses
import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from learner.config import LearnerConfig
from rollout.config import RolloutConfig
from rollout.tasks import DEMO_MODEL, DEMO_SOURCE, arithmetic, build_demo, source, sources
from rollout.types import UserError

numbers = st.integers(0, arithmetic.LIMIT - 1)


@pytest.fixture(scope="module")
def tokenizer():
    from transformers import PreTrainedTokenizerFast  # loads without torch, unlike AutoTokenizer

    return PreTrainedTokenizerFast.from_pretrained(DEMO_MODEL)


def test_the_two_splits_share_no_problem_and_leave_none_out():
    train, held_out = arithmetic.pairs("train"), arithmetic.pairs("eval")
    assert not set(train) & set(held_out)
    assert len(set(train)) + len(set(held_out)) == arithmetic.LIMIT**2
    assert 0.05 < len(held_out) / arithmetic.LIMIT**2 < 0.10
    assert len(held_out) >= 512


def test_a_problem_and_its_mirror_image_are_on_the_same_side():
    held_out = set(arithmetic.pairs("eval"))
    assert {(b, a) for a, b in held_out} == held_out


def test_the_split_is_the_one_the_shipped_model_was_trained_with():
    """Changing the hash would put problems the model has seen into the held-out split."""
    assert [row["row_id"] for row in arithmetic.rows("", seed=0, split="eval")[:4]] == [
        "65+91",
        "77+16",
        "29+64",
        "41+17",
    ]
    assert len(arithmetic.pairs("eval")) == 880


def test_the_seed_of_a_run_changes_neither_rows_nor_order():
    assert arithmetic.rows("", seed=0, split="eval") == arithmetic.rows("", seed=1, split="eval")


def test_the_first_held_out_problems_are_no_special_slice():
    first = arithmetic.pairs("eval")[:512]
    for digits in ([a % 10 for a, _ in first], [b // 10 for _, b in first], [(a + b) % 10 for a, b in first]):
        counts = [digits.count(digit) for digit in range(10)]
        assert min(counts) > 25, counts


def test_every_answer_is_the_sum_and_every_row_id_is_unique():
    rows = arithmetic.rows("", seed=0, split="train") + arithmetic.rows("", seed=0, split="eval")
    assert len({row["row_id"] for row in rows}) == len(rows)
    for row in rows:
        left, right = row["prompt"].removesuffix("=").split("+")
        assert int(row["answer"]) == int(left) + int(right)


def test_the_scratchpad_of_the_documented_example():
    assert arithmetic.problem(47, 85) == "47+85="
    assert arithmetic.response(47, 85) == "<think>7+5=12,4+8+1=13</think>132"
    assert arithmetic.scratchpad(3, 4) == "3+4=7,0+0=0"


@given(numbers, numbers)
def test_the_scratchpad_adds_digits_and_leads_to_the_answer(a: int, b: int):
    units, tens = arithmetic.scratchpad(a, b).split(",")
    for step in (units, tens):
        terms, result = step.split("=")
        assert sum(map(int, terms.split("+"))) == int(result)
    assert int(tens.split("=")[1]) * 10 + int(units[-1]) == a + b


def test_a_variant_that_does_not_exist_is_refused():
    with pytest.raises(UserError, match="arithmetic:carries"):
        arithmetic.rows("3", seed=0, split="train")


def test_the_variant_has_the_sums_in_which_both_digits_carry_and_nothing_else():
    for split in ("train", "eval"):
        chosen = {row["row_id"] for row in arithmetic.rows("carries", seed=0, split=split)}
        everything = {row["row_id"]: row for row in arithmetic.rows("", seed=0, split=split)}
        assert chosen < set(everything)
        for row_id, row in everything.items():
            both = len(row["scratchpad"]) == len("7+5=12,4+8+1=13") and len(row["answer"]) == 3
            both = both and sum(int(n) for n in row["scratchpad"].split(",")[1].split("=")[0].split("+")[:2]) > 9
            assert (row_id in chosen) == both, row_id


def test_sources_are_found_by_name_and_unknown_names_are_answered_with_the_known_ones():
    assert source(DEMO_SOURCE).rows is arithmetic.rows
    assert "build_demo" not in sources()
    with pytest.raises(UserError, match=r"aritmetic.*arithmetic"):
        source("aritmetic")


def test_half_a_source_is_an_error_and_not_overlooked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    import rollout.tasks

    (tmp_path / "forgot_its_name.py").write_text("def rows(spec, *, seed, split):\n    return []\n")
    monkeypatch.setattr(rollout.tasks, "__path__", [*rollout.tasks.__path__, str(tmp_path)])
    with pytest.raises(UserError, match="forgot_its_name is half a source"):
        sources()


@given(numbers, numbers, st.integers(0, 10**6))
def test_careless_responses_are_well_formed_and_their_answer_follows_their_steps(a: int, b: int, seed: int):
    text, answer = build_demo.careless_scratchpad(random.Random(seed), a, b)
    found = re.fullmatch(r"\d\+\d=(\d+),\d\+\d(?:\+1)?=(\d+)", text)
    assert found is not None
    assert answer == int(found[2]) * 10 + int(found[1]) % 10


def test_warm_start_responses_come_in_the_shares_of_the_mixture():
    rng = random.Random(0)
    samples = [build_demo.sample_response(rng, 47, 85) for _ in range(4000)]
    well_formed = sum(bool(re.fullmatch(r"<think>[^<>]*</think>\d+", text)) for text in samples)
    assert 0.54 < well_formed / len(samples) < 0.60
    assert 0.23 < sum(text.isdigit() for text in samples) / len(samples) < 0.29


def test_text_survives_the_tokenizer_exactly(tokenizer):
    rng = random.Random(0)
    texts = [build_demo.sample_response(rng, rng.randrange(100), rng.randrange(100)) for _ in range(200)]
    texts += ["".join(map(chr, range(32, 127))), "two  spaces, 'a ,b' .\nnew line", "<think></think>", ""]
    for text in texts:
        assert tokenizer.decode(tokenizer.encode(text)) == text
        assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=True) == text


def test_every_id_survives_the_tokenizer_exactly(tokenizer):
    """Also the ids that no text of the demo uses: a sampled id must never decode to nothing."""
    for token_id in range(build_demo.VOCABULARY_SIZE):
        if token_id != tokenizer.unk_token_id:
            text = tokenizer.decode([token_id])
            assert text
            assert tokenizer.convert_tokens_to_ids(text) == token_id


def test_think_tags_are_single_ids_and_the_end_token_is_visible_in_the_text(tokenizer):
    ids = tokenizer.encode("<think>7+5=12,4+8+1=13</think>132")
    assert len(ids) == 2 + len("7+5=12,4+8+1=13") + 3
    assert ids[0] == tokenizer.convert_tokens_to_ids("<think>")
    assert tokenizer.convert_tokens_to_ids("</think>") in ids
    shown = tokenizer.decode([*ids, tokenizer.eos_token_id], skip_special_tokens=False)
    assert shown == "<think>7+5=12,4+8+1=13</think>132<eos>"


def test_a_prompt_gets_no_extra_tokens(tokenizer):
    assert len(tokenizer("47+85=")["input_ids"]) == 6
    assert tokenizer.chat_template is None


def test_the_longest_warm_start_response_fits_the_recommended_length(tokenizer):
    rng = random.Random(1)
    longest = max(len(tokenizer.encode(build_demo.sample_response(rng, 99, 99))) for _ in range(500))
    assert longest + 1 <= recommended()["rollout.max_new_tokens"]


def test_the_shipped_model_is_small_and_of_the_documented_shape():
    from safetensors import safe_open

    weights = DEMO_MODEL / "model.safetensors"
    assert weights.stat().st_size < 2_000_000
    with safe_open(weights, framework="numpy") as file:
        parameters = sum(file.get_tensor(name).size for name in file.keys())  # noqa: SIM118 - not a dict
        assert not any("lm_head" in name for name in file.keys())  # noqa: SIM118
    assert 190_000 < parameters < 220_000
    config = json.loads((DEMO_MODEL / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForCausalLM"]
    assert config["tie_word_embeddings"] is True
    assert (config["hidden_size"], config["num_hidden_layers"], config["vocab_size"]) == (64, 4, 128)


def test_end_and_padding_ids_agree_wherever_they_are_written(tokenizer):
    config = json.loads((DEMO_MODEL / "config.json").read_text())
    generation = json.loads((DEMO_MODEL / "generation_config.json").read_text())
    assert config["eos_token_id"] == generation["eos_token_id"] == tokenizer.eos_token_id
    assert config["pad_token_id"] == generation["pad_token_id"] == tokenizer.pad_token_id
    assert tokenizer.pad_token_id != tokenizer.eos_token_id


def recommended() -> dict[str, Any]:
    return dict(json.loads((DEMO_MODEL / "rollearn.json").read_text()))


def test_recommended_settings_are_fields_of_the_configuration():
    fields = {"learner": LearnerConfig, "rollout": RolloutConfig}
    for key in recommended():
        section, name = key.split(".")
        assert name in {field.name for field in dataclasses.fields(fields[section])}
    assert recommended() == build_demo.SETTINGS


def test_the_shipped_tokenizer_is_the_one_the_rebuild_command_makes(tokenizer):
    made = build_demo.make_tokenizer()
    assert made.get_vocab() == tokenizer.get_vocab()
    assert made.backend_tokenizer.to_str() == tokenizer.backend_tokenizer.to_str()
