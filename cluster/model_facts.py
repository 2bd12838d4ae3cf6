"""What a model directory says about itself, as far as the plan needs it: read without any heavy library."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.errors import PlanError
from rollout.tasks import DEMO_MODEL

FILES = (".safetensors", ".gguf", ".bin", ".pt", ".json", ".toml")
"""What is a file and no hub id; other suffixes are none: the point of Qwen/Qwen2.5-0.5B is part of the name."""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What the model directory says about itself."""

    path: str
    """Directory (or hub id) to load from."""
    vocab_size: int
    """V."""
    max_positions: int
    """Longest sequence the model was built for."""
    recommended: dict[str, Any]
    """Settings the directory recommends (rollearn.json), by dotted name."""


def read_model_facts(model: str) -> ModelFacts:
    """Facts about a model directory; of a hub id nothing is known before it is fetched."""
    if model == "demo":
        return _facts(DEMO_MODEL)
    path = Path(model)
    if path.is_dir():
        return _facts(path.resolve())
    if model.startswith((".", "/", "~")) or path.suffix in FILES or model.count("/") != 1:
        raise PlanError(
            f"--model {model}: there is no such directory.\n"
            f"  Give a directory with config.json and safetensors, a hub id (owner/name), or leave it out for the demo."
        )
    return ModelFacts(path=model, vocab_size=0, max_positions=0, recommended={})


def _facts(path: Path) -> ModelFacts:
    config = path / "config.json"
    if not config.is_file():
        raise PlanError(f"--model {path}: no config.json in it; give a Hugging Face model directory.")
    data = json.loads(config.read_text())
    own = path / "rollearn.json"
    return ModelFacts(
        path=str(path),
        vocab_size=int(data.get("vocab_size", 0)),
        max_positions=int(data.get("max_position_embeddings", 0)),
        recommended=json.loads(own.read_text()) if own.is_file() else {},
    )
