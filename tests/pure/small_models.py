"""Tokenizers and untrained models made on the spot: small, and with the habits of real ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

TEXT = ["The answer is 42. What is 17 + 25? think about it <think> and </think> user assistant system"] * 4
SPECIAL = ["<|begin|>", "<|end|>", "<|im_start|>", "<|im_end|>"]
CHAT = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
CHAT_WITH_BOS = "{{ bos_token }}" + CHAT
CHAT_WITHOUT_SYSTEM = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + CHAT
)


def byte_level_bpe(*, adds_bos: bool = False, chat_template: str = "", size: int = 300) -> Any:
    """A byte-level BPE tokenizer without think tags, as base models have."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.train_from_iterator(
        TEXT,
        trainers.BpeTrainer(
            vocab_size=size,
            special_tokens=SPECIAL,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    if adds_bos:
        core.post_processor = processors.TemplateProcessing(
            single="<|begin|> $A", special_tokens=[("<|begin|>", core.token_to_id("<|begin|>"))]
        )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<|begin|>", eos_token="<|end|>")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    if chat_template:
        tokenizer.chat_template = chat_template
    return tokenizer


def save_model(
    folder: Path, tokenizer: Any, *, rows: int, tied: bool, architecture: str = "llama", **larger: int
) -> Path:
    """A model directory with an embedding of `rows` rows; weights are random but the same every time.

    `larger`: fields of the configuration, for a model that is not tiny.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    shape: dict[str, Any] = {
        "vocab_size": rows,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,  # what the engine can attend with on a CPU
        "max_position_embeddings": 512,
        "tie_word_embeddings": tied,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": None,
        **larger,
    }
    torch.manual_seed(0)
    model = (
        LlamaForCausalLM(LlamaConfig(**shape)) if architecture == "llama" else Qwen3ForCausalLM(Qwen3Config(**shape))
    )
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|im_end|>")]
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
