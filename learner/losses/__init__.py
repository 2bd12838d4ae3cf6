"""One file = one policy loss. It returns the loss of every unit, unreduced; nothing here divides by a count.

To add one, put a file here (or anywhere, and pass its path as --learner.loss path/file.py) with

    LEVELS = ("token",)                 # ratio levels it is defined for; default: token
    SETTINGS = ("clip_high",)           # fields of Objective it reads; default: none
    def policy_loss(given: LossInputs) -> LossTerms: ...

A unit is a token or, with a sequence ratio, a response. LEVELS = () marks a loss without a ratio: its units are tokens.
The loss must be differentiable in `given.ratio` or `given.logprobs` and finite wherever those are.
"""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from rollout.types import UserError

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class LossInputs:
    """What a policy loss may look at: tensors of one shape, (B, T) for tokens or (B,) for responses, in float64."""

    ratio: Tensor
    """Policy over old policy, with gradient (without it for losses that have no ratio)."""
    logprobs: Tensor
    """Log-prob of the unit under the policy, with gradient; a response's is the sum over its tokens."""
    advantages: Tensor
    """Advantage of the unit's response."""
    valid: Tensor
    """True where the unit exists; elsewhere the other tensors hold harmless numbers and the loss is ignored."""
    clip_low: float
    """Ratios below 1 - this are clipped."""
    clip_high: float
    """Ratios above 1 + this are clipped."""
    dual_clip: float | None
    """Bound c of the loss for negative advantages."""
    cispo_cap: float
    """Absolute cap of the CISPO weight."""


@dataclass(frozen=True, slots=True)
class LossTerms:
    """What a policy loss returns."""

    loss: Tensor
    """Loss of each unit, shape of the ratio."""
    clipped: Mapping[str, Tensor] = field(default_factory=dict)
    """Any of low, high, dual -> bool, where that bound is at work (becomes policy/clip_fraction_...)."""


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """A loaded loss."""

    name: str
    """As it was asked for."""
    function: Callable[[LossInputs], LossTerms]
    """The mathematics."""
    levels: tuple[str, ...]
    """Ratio levels it is defined for; empty when it has no ratio."""
    settings: frozenset[str]
    """Fields of Objective it reads."""


def available() -> tuple[str, ...]:
    """Names of the losses in this folder."""
    return tuple(sorted(found.name for found in pkgutil.iter_modules(__path__)))


@lru_cache(maxsize=64)
def load(name: str) -> PolicyLoss:
    """A loss of this folder by name, or one of the user's by path; UserError when there is none."""
    if name.endswith(".py"):
        module = _from_path(Path(name))
    elif name in available():
        module = importlib.import_module(f"{__name__}.{name}")
    else:
        raise UserError(
            f"--learner.loss {name!r} is unknown; choose one of: {', '.join(available())}, or the path of a .py file "
            f"that defines policy_loss (learner/losses/__init__.py says how)."
        )
    function = getattr(module, "policy_loss", None)
    if not callable(function):
        raise UserError(f"--learner.loss {name}: the file defines no function policy_loss(given: LossInputs).")
    levels, settings = getattr(module, "LEVELS", ("token",)), getattr(module, "SETTINGS", ())
    return PolicyLoss(name, function, tuple(levels), frozenset(settings))


def _from_path(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"policy_loss_{path.stem}", path)
    if spec is None or spec.loader is None or not path.is_file():
        raise UserError(f"--learner.loss {path}: there is no such file.")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
