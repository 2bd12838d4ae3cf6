from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from rollout.tasks import DEMO_MODEL
from rollout.tokens import (
    END_THINK,
    RECORD,
    THINK,
    add_tags,
    load_tokenizer,
    prepare_model,
    single_id,
    stop_token_ids,
)
from rollout.types import UserError
from tests.pure.small_models import byte_level_bpe, save_model

TEXT = "<think>17 + 25</think>The answer is 42.<|end|>"


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Directories of untrained base models whose tokenizer has no tags: with and without spare rows."""
    folder = tmp_path_factory.mktemp("models")
    tokenizer = byte_level_bpe()
    size = len(tokenizer)
    return {
        "spare": save_model(folder / "spare", tokenizer, rows=size + 8, tied=True, architecture="qwen3"),
        "full": save_model(folder / "full", tokenizer, rows=size, tied=True),
        "full untied": save_model(folder / "full-untied", tokenizer, rows=size, tied=False),
        "spare untied": save_model(folder / "spare-untied", tokenizer, rows=size + 2, tied=False, architecture="qwen3"),
    }


def weights(folder: str | Path):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype="auto")


def test_a_base_tokenizer_writes_the_tags_in_pieces():
    tokenizer = byte_level_bpe()
    assert single_id(tokenizer, THINK) is None
    assert len(tokenizer.encode(THINK)) > 1


def test_added_tags_are_one_id_each_wherever_they_stand_and_survive_save_and_load(tmp_path):
    tokenizer = byte_level_bpe()
    think, end_think = add_tags(tokenizer)
    tokenizer.save_pretrained(tmp_path)
    for each in (tokenizer, load_tokenizer(str(tmp_path))):
        assert (single_id(each, THINK), single_id(each, END_THINK)) == (think, end_think)
        ids = each.encode(TEXT)
        assert (ids.count(think), ids.count(end_think)) == (1, 1)
        assert each.decode(ids) == TEXT
        assert THINK in each.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("name", ["spare", "full", "full untied", "spare untied"])
def test_a_prepared_model_has_a_row_for_each_tag_and_is_otherwise_the_same(base, name, tmp_path):
    import torch

    before, tokenizer = weights(base[name]), load_tokenizer(str(base[name]))
    pieces = {tag: tokenizer.encode(tag, add_special_tokens=False) for tag in (THINK, END_THINK)}
    prepared = prepare_model(base[name], tmp_path / "model")
    assert prepared.path == str(tmp_path / "model")
    after, tokenizer = weights(prepared.path), load_tokenizer(prepared.path)
    assert (single_id(tokenizer, THINK), single_id(tokenizer, END_THINK)) == (prepared.think_id, prepared.end_think_id)

    rows = before.get_input_embeddings().weight.shape[0]
    grown = max(rows, prepared.end_think_id + 1)
    assert after.config.vocab_size == after.get_input_embeddings().weight.shape[0] == grown
    assert (grown == rows) == name.startswith("spare")
    for read in ("get_input_embeddings", "get_output_embeddings"):
        old, new = getattr(before, read)().weight, getattr(after, read)().weight
        for tag, token in ((THINK, prepared.think_id), (END_THINK, prepared.end_think_id)):
            assert torch.allclose(new[token], old[pieces[tag]].mean(0), atol=1e-6)
        kept = [i for i in range(rows) if i not in (prepared.think_id, prepared.end_think_id)]
        assert torch.equal(new[kept], old[kept])
    others = {key: value for key, value in before.state_dict().items() if "embed" not in key and "lm_head" not in key}
    assert all(torch.equal(after.state_dict()[key], value) for key, value in others.items())
    assert after.config.tie_word_embeddings == before.config.tie_word_embeddings
    assert not torch.equal(
        after.get_input_embeddings().weight[prepared.think_id],
        after.get_input_embeddings().weight[prepared.end_think_id],
    )


def test_the_warning_says_that_reinforcement_learning_will_not_teach_the_tags(base, tmp_path):
    prepared = prepare_model(base["full"], tmp_path / "model")
    assert "wrote <think> and </think> in pieces" in prepared.warnings[0]
    assert "will not learn them from reinforcement learning alone" in prepared.warnings[1]


def test_end_tokens_and_recommended_settings_travel_with_the_copy(base, tmp_path):
    (base["full"] / "rollearn.json").write_text("{}")
    prepared = prepare_model(base["full"], tmp_path / "model")
    tokenizer = load_tokenizer(prepared.path)
    ends = {tokenizer.convert_tokens_to_ids("<|end|>"), tokenizer.convert_tokens_to_ids("<|im_end|>")}
    assert set(prepared.stop_ids) == ends
    assert set(prepare_model(prepared.path, tmp_path / "again").stop_ids) == ends
    assert (tmp_path / "model" / "rollearn.json").is_file()
    (base["full"] / "rollearn.json").unlink()


def test_nothing_is_copied_when_nothing_has_to_change(base, tmp_path):
    demo = prepare_model(DEMO_MODEL, tmp_path / "demo")
    assert demo.path == str(DEMO_MODEL)
    assert demo.warnings == ()
    prepared = prepare_model(base["spare"], tmp_path / "model")
    again = prepare_model(prepared.path, tmp_path / "again")
    assert (again.path, again.think_id, again.warnings) == (prepared.path, prepared.think_id, ())
    assert not (tmp_path / "demo").exists()
    assert not (tmp_path / "again").exists()


def test_a_copy_of_the_same_files_is_used_again_and_another_one_refused(base, tmp_path):
    first = prepare_model(base["spare"], tmp_path / "model")
    content = files(tmp_path / "model")
    assert prepare_model(base["spare"], tmp_path / "model") == first
    assert files(tmp_path / "model") == content
    with pytest.raises(UserError, match="prepared from other files"):
        prepare_model(base["full"], tmp_path / "model")


def test_a_place_that_is_taken_is_refused_and_left_alone(base, tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="is not empty and is no prepared model"):
        prepare_model(base["spare"], tmp_path / "model")
    assert files(tmp_path / "model") == {"notes.txt": b"mine"}


def test_a_copy_that_was_cut_short_is_made_anew(base, tmp_path):
    (tmp_path / ".model.part").mkdir()
    (tmp_path / ".model.part" / "half").write_text("x")
    prepared = prepare_model(base["spare"], tmp_path / "model")
    assert (Path(prepared.path) / RECORD).is_file()
    assert not (tmp_path / ".model.part").exists()
    assert not (Path(prepared.path) / "half").exists()


def test_tags_beyond_the_embedding_get_rows(tmp_path):
    """A tokenizer with the tags beside a model whose embedding was never grown for them."""
    tokenizer = byte_level_bpe()
    rows = len(tokenizer)
    add_tags(tokenizer)
    model = save_model(tmp_path / "base", tokenizer, rows=rows, tied=False)
    prepared = prepare_model(model, tmp_path / "model")
    assert prepared.path != str(model)
    assert weights(prepared.path).config.vocab_size == prepared.end_think_id + 1
    assert "larger than its embedding" in prepared.warnings[0]


def test_end_tokens_are_those_of_tokenizer_and_generation_config_together():
    def with_eos(value):
        return SimpleNamespace(eos_token_id=value)

    assert stop_token_ids(with_eos(5), with_eos([7, 5])) == (5, 7)
    assert stop_token_ids(with_eos(None), with_eos(3)) == (3,)
    assert stop_token_ids(with_eos(0), with_eos(None)) == (0,)
    with pytest.raises(UserError, match="no response would ever end"):
        stop_token_ids(with_eos(None), with_eos(None))


def test_a_model_that_is_not_there_is_the_users_mistake(tmp_path):
    with pytest.raises(UserError, match="no such directory"):
        prepare_model(tmp_path / "nothing", tmp_path / "out")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="its tokenizer cannot be loaded"):
        prepare_model(tmp_path / "empty", tmp_path / "out")
