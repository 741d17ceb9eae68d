"""Environment variables that say which GPUs a process gets: INFERENCE_A_GPUS=0,1, TRAINER_MODEL0_GPUS=2,3, ...

INFERENCE_GPUS and TRAINER_GPUS, without a name, are those of the only service or policy of the recipe. A trainer
has as many ranks as its variable names GPUs, on each of its nodes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from services.common.errors import ConfigError


def gpu_settings(tree: Mapping[str, Any], environment: Mapping[str, str]) -> list[tuple[tuple[str, ...], Any]]:
    """(path in the recipe, value) of every such variable that is set.

    Raises:
        ConfigError: the value is no list of numbers, or the variable names no section and the recipe has several.
    """
    settings: list[tuple[tuple[str, ...], Any]] = []
    for kind, section in (("INFERENCE", "inference"), ("TRAINER", "policies")):
        # A recipe that names no inference service has one, "a".
        names = list(tree.get(section) or (["a"] if section == "inference" else []))
        for name, variable in _variables(kind, names, environment):
            gpus = _gpus(variable, environment[variable])
            if section == "inference":
                settings.append(((section, name, "gpus"), gpus))
            else:
                settings.append(((section, name, "trainer", "gpus"), gpus))
                settings.append(((section, name, "trainer", "num_ranks"), len(gpus) * _num_nodes(tree, name)))
    return settings


def _num_nodes(tree: Mapping[str, Any], policy: str) -> int:
    """The nodes of a trainer in the recipe or its defaults; an invalid value is refused later, with its path."""
    defaults = (tree.get("defaults") or {}).get("policies") or {}
    for section in ((tree["policies"] or {}).get(policy) or {}, defaults):
        nodes = (section.get("trainer") or {}).get("nodes")
        if nodes:
            return len(nodes) if isinstance(nodes, list) else 1
    return 1


def _variables(kind: str, names: list[str], environment: Mapping[str, str]) -> list[tuple[str, str]]:
    found = [(name, f"{kind}_{str(name).upper().replace('-', '_')}_GPUS") for name in names]
    common = f"{kind}_GPUS"
    if common in environment:
        if len(names) != 1:
            raise ConfigError(f"the variable {common} does not name a section; set {' and '.join(v for _, v in found)}")
        found.insert(0, (names[0], common))
    return [(name, variable) for name, variable in found if variable in environment]


def _gpus(variable: str, text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdigit() for part in parts):
        raise ConfigError(f"the variable {variable} is {text!r}; write numbers of GPUs with commas, such as 0,1")
    return [int(part) for part in parts]
