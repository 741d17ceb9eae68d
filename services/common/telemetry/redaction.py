"""Removes secrets from logs and files: run tokens, bearer headers, private keys, passwords in addresses."""

from __future__ import annotations

import re
from typing import Any

HIDDEN = "[hidden]"

# Only texts with one of these are searched: most have none.
_HINTS = ("eyJ", "earer ", "PRIVATE KEY", "uthorization", "@")
_PASSWORD = re.compile(r"(\b[a-z][a-z0-9+.-]*://)[^/@\s\"']*@")
_SECRETS = (
    (re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----(?:.*?-----END [A-Z ]*PRIVATE KEY-----|.*)", re.DOTALL), HIDDEN),
    (re.compile(r"eyJ[\w-]{8,}(?:\.[\w-]*){0,2}(?:~[\w-]+)?"), HIDDEN),  # a JWT, and the session that may follow it
    (re.compile(r"(\b[Bb]earer )[^\s\"'\\,)\]}]+"), rf"\1{HIDDEN}"),
    (
        re.compile(
            r"([\"']?[Aa]uthorization[\"']?\s*[:=,]\s*[\"']?(?:[Bb]asic )?)(?![Bb]earer |[Bb]asic )[^\s\"'\\,)\]}]+"
        ),
        rf"\1{HIDDEN}",
    ),
    (_PASSWORD, rf"\1{HIDDEN}@"),
)


def without_passwords(tree: Any) -> Any:
    """Settings for display: user and password of every address are hidden, at any depth."""
    if isinstance(tree, dict):
        return {key: without_passwords(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [without_passwords(value) for value in tree]
    return _PASSWORD.sub(rf"\1{HIDDEN}@", tree) if isinstance(tree, str) else tree


def redacted(text: str) -> str:
    """The text with ``[hidden]`` in place of every secret that is recognised by its form."""
    if not any(hint in text for hint in _HINTS):
        return text
    for pattern, instead in _SECRETS:
        text = pattern.sub(instead, text)
    return text
