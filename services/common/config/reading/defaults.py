"""The key ``defaults`` of a recipe: settings of all its policies and of all its inference services, written once.

    defaults:
      policies: {batch: {size: 256}}      # every policy without its own value under policies.<name>
      inference: {engine: sglang}         # every service without its own value under inference.<name>

They are merged under each entry before the recipe is validated; the resolved recipe holds them spread out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from services.common.errors import ConfigError

SECTIONS = ("policies", "inference")


def spread_defaults(tree: Mapping[str, Any]) -> dict[str, Any]:
    """The tree without ``defaults``, its settings under each entry. Raises ``ConfigError`` for another section."""
    result = dict(tree)
    defaults = result.pop("defaults", None) or {}
    if not isinstance(defaults, Mapping):
        raise ConfigError(f"defaults: write {' and '.join(SECTIONS)} below it")
    for section, settings in defaults.items():
        if section not in SECTIONS:
            raise ConfigError(f"defaults.{section}: unknown key; write one of {', '.join(SECTIONS)}")
        entries = result.get(section)
        if isinstance(entries, Mapping) and isinstance(settings, Mapping):
            result[section] = {
                name: merge(settings, entry if entry is not None else {}) for name, entry in entries.items()
            }
    return result


def merge(base: Mapping[str, Any], top: Any) -> Any:
    """``top`` over ``base``: mappings key by key, everything else replaced."""
    if not isinstance(top, Mapping):
        return top
    merged = dict(base)
    for key, value in top.items():
        old = merged.get(key)
        merged[key] = merge(old, value) if isinstance(old, Mapping) else value
    return merged
