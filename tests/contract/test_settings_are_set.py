"""Each setting of a recipe is set by somebody: a recipe, an example, a profile or a test of what it does.

A key that nobody sets to another value than its default is a constant, and belongs beside its use. A key counts as set
where it is written in source: as a keyword of its class, as a key below its section (YAML, a dict), or with its section
in a dotted path (``--set sandbox.num_slots=2``). A name that only one section has counts wherever it is a keyword, a key
of a dict or of YAML.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import re
import typing
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from services.common.config.recipe import Recipe

ROOT = Path(__file__).parents[2]
PLACES = (
    "recipes", "examples", "tests", "extras", "services/cli/profiles.py", "services/common/tiny.py",
)  # fmt: skip

# Section.key -> why it is a setting although nothing in the repository sets it to another value.
MOST = 300
KEPT = {
    "DatasetConfig.shuffle": "rows that are a curriculum in their own order",
    "ValueHeadConfig.coefficient": "PPO's weight of the value loss",
    "AlgorithmConfig.kl_estimator": "systems differ in it (docs/conventions.md)",
    "AlgorithmConfig.kl_clamp": "verl and AReaL clamp at 10",
    "InferenceConfig.policies": "several policies on services of their own; the tests name it below a service's name",
    "QueueConfig.redis_prefix": "several farms at one Redis",
    "QueueConfig.allow_plain_redis": "a Redis of a private network without TLS",
    "HttpConfig.reuse_port": "several gateways behind one port of Code Judge; the option --share-http-port",
    "OpenEnvConfig.observation": "environments whose observation has several texts",
    "GymnasiumConfig.id": "the environment itself; recipes name it below a name of their own",
    "GymnasiumConfig.settings": "as GymnasiumConfig.id",
    "GymnasiumConfig.observation": "as GymnasiumConfig.id",
    "WarmStartConfig.steps": "recipes name it below a policy's name",
    "WarmStartConfig.betas": "recipes name it below a policy's name",
    "LaunchConfig.chosen_ports": "written by the launcher into the run directory's recipe",
    "OnNode.node": "recipes name it below a service's name",
}


def _sections(annotation: Any, found: dict[type[BaseModel], set[str]], key: str = "") -> None:
    """Every section below an annotation, with the keys under which recipes write it."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        is_new = annotation not in found
        found.setdefault(annotation, set()).add(key)
        if is_new:
            for name, field in annotation.model_fields.items():
                _sections(field.annotation, found, name)
    for argument in typing.get_args(annotation):
        _sections(argument, found, key)


def _holds_a_section(annotation: Any) -> bool:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return True
    return any(map(_holds_a_section, typing.get_args(annotation)))


def leaf_keys() -> dict[tuple[str, str], tuple[set[str], set[str], Any]]:
    """(class that declares it, key) -> classes that have it, keys under which these are written, default."""
    found: dict[type[BaseModel], set[str]] = {}
    _sections(Recipe, found)
    leaves: dict[tuple[str, str], tuple[set[str], set[str], Any]] = {}
    for section, written in found.items():
        for name, field in section.model_fields.items():
            if _holds_a_section(field.annotation):
                continue
            owner = next(c for c in reversed(section.__mro__) if name in inspect.get_annotations(c))
            classes, places, _ = leaves.setdefault((owner.__name__, name), ({owner.__name__}, set(), field.default))
            classes.add(section.__name__)
            places |= written
    return leaves


_UNKNOWN = object()  # a value that the source does not write out


def _value(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except ValueError:
        return _UNKNOWN


_YAML_LINE = re.compile(r"(\s*)(?:- )?([A-Za-z_]\w*):(?:\s+([^#\n]*))?$")
_INLINE = re.compile(r"([A-Za-z_]\w*)\s*[:=]\s*([^\s,}\]]*)")
_DOTTED = re.compile(r"([A-Za-z_][\w-]*(?:\.[\w-]+)+)=?(\S*)")


def _of_text(text: str) -> Iterator[tuple[str, str, Any]]:
    """(section, key, value) of YAML and of dotted paths; the section is empty where it is not known."""
    above: list[tuple[int, str]] = []
    for line in text.splitlines():
        if ":" not in line and "=" not in line:
            continue
        for path, value in _DOTTED.findall(line):
            parts = path.split(".")
            if value:
                for section, key in itertools.pairwise(parts):
                    yield section, key, value
        if (found := _YAML_LINE.match(line)) is not None:
            indent, key, value = len(found[1]), found[2], (found[3] or "").strip()
            while above and above[-1][0] >= indent:
                above.pop()
            yield above[-1][1] if above else "", key, value or _UNKNOWN
            above.append((indent, key))
        holder = above[-1][1] if above else ""
        for key, value in _INLINE.findall(line):
            yield holder, key, value


def _of_python(text: str) -> Iterator[tuple[str, str, Any]]:
    """The same of Python; the section is the name of a class or the key above a dict."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            for keyword in node.keywords:
                if keyword.arg:
                    yield called, keyword.arg, _value(keyword.value)
                    if isinstance(keyword.value, ast.Dict):
                        yield from _of_dict(keyword.arg, keyword.value)
        elif isinstance(node, ast.Dict):
            yield from _of_dict("", node)
            for key, value in zip(node.keys, node.values, strict=True):
                if isinstance(key, ast.Constant) and isinstance(value, ast.Dict):
                    yield from _of_dict(str(key.value), value)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from _of_text(node.value)


def _of_dict(section: str, node: ast.Dict) -> Iterator[tuple[str, str, Any]]:
    for key, value in zip(node.keys, node.values, strict=True):
        if isinstance(key, ast.Constant) and isinstance(key.value, str):
            yield section, key.value, _value(value)
            if "." in key.value:
                yield (*key.value.split(".")[-2:], _value(value))


def settings_in_source() -> dict[str, list[tuple[str, Any]]]:
    """Key -> (section or class, value) of every place that sets it."""
    found: dict[str, list[tuple[str, Any]]] = defaultdict(list)
    for place in PLACES:
        base = ROOT / place
        for file in [base] if base.is_file() else sorted(base.rglob("*")):
            if file.suffix not in (".py", ".yaml", ".yml", ".md", ".sh") or file == Path(__file__):
                continue
            text = file.read_text(encoding="utf-8")
            for section, key, value in _of_python(text) if file.suffix == ".py" else _of_text(text):
                found[key].append((section, value))
    return found


def _is_set(places: list[tuple[str, Any]], names: set[str], default: Any, alone: bool) -> bool:
    words = {True: "true", False: "false", None: "null"}.get(default) if isinstance(default, bool | None) else None
    equal = {str(default), str(default).lower(), words}
    return any(
        value is not None and value != default and str(value).strip("'\"") not in equal
        for section, value in places
        if alone or section in names
    )


def _unset() -> set[str]:
    leaves, source = leaf_keys(), settings_in_source()
    owners = Counter(name for _, name in leaves)
    return {
        f"{owner}.{name}"
        for (owner, name), (classes, written, default) in leaves.items()
        if not _is_set(source[name], classes | written, default, owners[name] == 1)
    }


def test_each_setting_is_set_by_a_recipe_or_a_test() -> None:
    unset = _unset()
    assert unset <= set(KEPT), "nobody sets these: make them constants beside their uses"
    assert set(KEPT) <= {".".join(key) for key in leaf_keys()}, "KEPT names settings that are gone"


def test_recipes_have_no_more_settings_than_a_person_can_know() -> None:
    assert len(leaf_keys()) <= MOST
