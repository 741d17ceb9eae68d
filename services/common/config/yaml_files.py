"""Reads one YAML file of a recipe. Faults that a parser accepts silently are refused with file and line."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from services.common.errors import ConfigError
from services.common.public_names import new_name

_OLD_PATH = re.compile(r"services(\.\w+)+:\w+(\.\w+)*")


def read_yaml(file: Path, *, own_paths: bool = False) -> Any:
    """The content of the file. ``own_paths``: the file is written by Millrace, so names of modules of ``services`` are
    allowed.

    Raises:
        ConfigError: no YAML, a key twice in one mapping, or an import path into ``services``; each with its line.
    """
    try:
        loader = yaml.SafeLoader(file.read_text())
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}") from None
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{file} is not valid YAML: {error}") from None
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        for key, scalar in _scalars(node, file):
            if not own_paths and _OLD_PATH.fullmatch(scalar.value):
                raise ConfigError(
                    f"{_line(file, scalar)}: {key or scalar.value} names {scalar.value}, an inside of Millrace: {new_name(scalar.value)}"
                )
        return loader.construct_document(node)
    except yaml.YAMLError as error:
        raise ConfigError(f"{file} is not valid YAML: {error}") from None
    finally:
        loader.dispose()


def _scalars(node: yaml.Node, file: Path, path: str = "") -> Iterator[tuple[str, yaml.ScalarNode]]:
    """Every scalar value with its path. Refuses keys that stand twice."""
    if isinstance(node, yaml.ScalarNode):
        yield path, node
    elif isinstance(node, yaml.SequenceNode):
        for place, item in enumerate(node.value):
            yield from _scalars(item, file, f"{path}[{place}]")
    elif isinstance(node, yaml.MappingNode):
        seen: dict[str, yaml.Node] = {}
        for key, value in node.value:
            name = str(key.value)
            if name in seen:
                raise ConfigError(
                    f"{_line(file, key)}: {f'{path}.' if path else ''}{name} is there twice, first in line "
                    f"{seen[name].start_mark.line + 1}: give one of them another name, or leave it out"
                )
            seen[name] = key
            yield from _scalars(value, file, f"{path}.{name}" if path else name)


def _line(file: Path, node: yaml.Node) -> str:
    return f"{file}:{node.start_mark.line + 1}"
