"""The doctor's rules: one family of failure modes per file; every file in this folder is found by itself.

A rule is a function of a RunView, marked with `@rule`. It returns a Sign when it sees its failure mode and None when
it does not; it is called only when the log has what it needs.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Final

from cluster.run.findings import Finding, Severity
from cluster.run.series import RunView

Needs = tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class Sign:
    """What a rule saw."""

    severity: Severity
    since_round: int
    evidence: Mapping[str, str]
    cause: str = ""
    """Said instead of the rule's usual cause."""
    cure: str = ""
    """Said instead of the rule's usual cure."""


@dataclass(frozen=True, slots=True)
class Rule:
    """One failure mode: how to see it, why it happens, what to do."""

    id: str
    needs: Needs
    """Every entry must be met; an entry is met when any of its metrics is logged."""
    cause: str
    cure: str
    look: Callable[[RunView], Sign | None]

    def missing(self, view: RunView) -> tuple[str, ...]:
        """The needs that this log does not meet."""
        return tuple(" or ".join(keys) for keys in self.needs if not any(view.has(key) for key in keys))

    def finding(self, view: RunView) -> Finding | None:
        """Apply the rule."""
        sign = self.look(view)
        if sign is None:
            return None
        return Finding(
            self.id, sign.severity, sign.since_round, sign.evidence, sign.cause or self.cause, sign.cure or self.cure
        )


_RULES: Final[dict[str, Rule]] = {}


def rule(
    name: str, *, needs: Needs, cause: str, cure: str
) -> Callable[[Callable[[RunView], Sign | None]], Callable[[RunView], Sign | None]]:
    """Mark a function as the rule of one failure mode."""

    def mark(look: Callable[[RunView], Sign | None]) -> Callable[[RunView], Sign | None]:
        if name in _RULES:
            raise ValueError(f"two rules are called {name!r}")
        _RULES[name] = Rule(name, needs, cause, cure, look)
        return look

    return mark


@cache
def all_rules() -> tuple[Rule, ...]:
    """Every rule of this folder, in the order of file and definition."""
    for module in sorted(pkgutil.iter_modules(__path__), key=lambda module: module.name):
        importlib.import_module(f"{__name__}.{module.name}")
    return tuple(_RULES.values())
