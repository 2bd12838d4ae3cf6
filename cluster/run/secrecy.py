"""Secrets stay out of the run directory: settings that hold one are refused, and what is noted is stripped of them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from typing import Any

from cluster.errors import PlanError

SECRET_NAMES = re.compile(r"KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL", re.IGNORECASE)
"""Environment variables whose values are secrets."""
NO_SECRETS = re.compile(r"TOKENIZERS_|_PATH$|_FILE$|_DIR$|MAX_|_MODE$")
"""... unless they are called like this."""
SHORTEST = 8
"""A value shorter than this is no secret: it would be found everywhere."""
WITH_CREDENTIALS = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s@]+@", re.IGNORECASE)
"""A URL with a user or a token in it."""


def secrets_of(environment: Mapping[str, str]) -> dict[str, str]:
    """Value -> name of the variable it stands in."""
    return {value: name for name, value in environment.items() if _is_secret(name, value)}


def hidden(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Every variable that holds a secret, emptied: for processes that would inherit it and have no use for it.

    Ray's own token is left: without it no process of a run may talk to another.
    """
    return {
        name: "" for name, value in environment.items() if _is_secret(name, value) and not name.startswith("RAY_AUTH_")
    }


def _is_secret(name: str, value: str) -> bool:
    return len(value) >= SHORTEST and bool(SECRET_NAMES.search(name)) and not NO_SECRETS.search(name)


def refuse_secrets(settings: Iterable[tuple[str, Any]], environment: Mapping[str, str] = os.environ) -> None:
    """PlanError when a setting holds a secret: it would stand in config.toml and in every report."""
    secrets = secrets_of(environment)
    for name, value in settings:
        text = str(value)
        found = next((variable for secret, variable in secrets.items() if secret in text), None)
        if found is not None or WITH_CREDENTIALS.search(text):
            what = f"the value of ${found}" if found is not None else "a user name or token in its URL"
            flag = f"--{name.replace('_', '-')}"
            raise PlanError(
                f"{flag} has {what} in it, which would be written into the run directory.\n"
                f"  Leave it out: the libraries that need it read it from the environment (HF_TOKEN, WANDB_API_KEY)."
            )


def redacted(text: str, environment: Mapping[str, str] = os.environ) -> str:
    """A text without the secrets of the environment, and without credentials in URLs."""
    for secret, name in secrets_of(environment).items():
        text = text.replace(secret, f"<{name}>")
    return WITH_CREDENTIALS.sub(lambda match: match.group().split("://")[0] + "://<credentials>@", text)
