"""Loads a recipe file as a validated ``Recipe``: extends, overrides, variables, and errors with the correction.

Order, later wins: the files named by ``extends``, the recipe itself, ``--set a.b=c`` overrides, environment variables for
GPUs, a ``--profile``, the overrides again, environment variables for ports. ``defaults`` go below all of these (``config.defaults``).
Mappings are merged key by key; lists and scalars replace. A string that begins with ``./`` or
``../`` is a path relative to the file that holds it, in an override to the current directory; one that begins with ``~`` is
in a home. Both become absolute here, for all readers.

Imports neither torch nor grpc: a typo costs a second, not a night.
"""

from __future__ import annotations

import json
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from services.common.config.reading.defaults import spread_defaults, with_own_workflows
from services.common.config.reading.explain import explain
from services.common.config.reading.inherit import inherit, parent_of, shipped_recipe, whole_names
from services.common.config.recipe import Recipe
from services.common.errors import ConfigError
from services.common.importing import look_in
from services.common.public_names import new_name

RESOLVED = "recipe.json"
_MOST_DEPTH = 50  # of a setting in a recipe
_MOST_SHOWN = 200  # characters of a text in an error

Profile = Callable[[dict[str, Any]], dict[str, Any]]


def load_recipe(
    path: Path,
    overrides: Sequence[str] = (),
    environment: Mapping[str, str] = os.environ,
    profile: Profile | None = None,
) -> Recipe:
    """Read and validate a recipe: a file, a directory that holds ``recipe.yaml``, or the name of a recipe that comes
    with Rollmill, such as ``quickstart``; a file or directory of that name in the current directory goes first.

    ``profile`` transforms the whole recipe, and may choose other devices than the GPUs that variables name; overrides
    count before it and, but for ``data``, once more after it.

    Raises:
        ConfigError: with one line per problem: the path in the recipe, the fault, the correction.
    """
    file = _recipe_file(path)
    tree = _read(file, seen=())
    for override in overrides:
        apply_override(tree, override)
    for variable_path, gpus in gpu_settings(tree, environment):
        set_at(tree, variable_path, gpus)
    if profile is not None:
        tree = profile(validate(spread_defaults(tree), source=str(path)).model_dump(mode="json"))
        for override in overrides:
            if not override.strip().startswith("data."):  # the profile has replaced whole datasets
                apply_override(tree, override)
    _apply_ports(tree, environment)
    return validate(spread_defaults(tree), source=str(path))


def validate(tree: Mapping[str, Any], source: str) -> Recipe:
    """Validate a merged tree; ``source`` is named in the error. From then on the recipe's modules are found."""
    try:
        recipe = Recipe.model_validate(with_own_workflows(tree))
    except ValidationError as error:
        raise ConfigError(
            f"{source} cannot run:\n" + "\n".join(f"  {line}" for line in explain(error, Recipe))
        ) from None
    look_in(recipe.modules)
    return recipe


def save_resolved(recipe: Recipe, run_dir: Path) -> None:
    """Write the resolved recipe into the run directory, as JSON for processes and as YAML for people."""
    run_dir.mkdir(parents=True, exist_ok=True)
    tree = recipe.model_dump(mode="json")
    (run_dir / "recipe.yaml").write_text(yaml.safe_dump(tree, sort_keys=False, allow_unicode=True), encoding="utf-8")
    # Several processes of a split launch may write it at once.
    partial = run_dir / f"{RESOLVED}.{os.getpid()}-{threading.get_ident()}.partial"
    partial.write_text(json.dumps(tree, indent=1))
    partial.replace(run_dir / RESOLVED)


def load_resolved(run_dir: Path) -> Recipe:
    """Read the file of ``save_resolved``; raises ``ConfigError`` if the directory is no run directory, a damaged one,
    or one of a version with other settings."""
    path = run_dir / RESOLVED
    if not path.is_file():
        raise ConfigError(
            f"{run_dir} is no run directory: {RESOLVED} is missing; start a run with `rollmill run RECIPE`"
        )
    try:
        tree = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path} cannot be read ({error}): restore the file of the run's start, or start another run"
        ) from None
    try:
        return validate(tree, source=str(path))
    except ConfigError as error:
        raise ConfigError(
            f"{error.message}\n  If the file was not changed, another version of Rollmill began this run, with other settings: "
            "use that version for it, or start another run"
        ) from None


def with_run_id(recipe: Recipe, now: datetime | None = None) -> Recipe:
    """The same recipe with ``run.id`` set: its own, or name and time."""
    if recipe.run.id:
        return recipe
    stamp = (now or datetime.now()).strftime("%Y%m%d-%H%M%S")
    return recipe.model_copy(update={"run": recipe.run.model_copy(update={"id": f"{recipe.name}-{stamp}"})})


def _add_modules(tree: dict[str, Any], folder: Path) -> None:
    """The folder of a recipe, and those of the recipes that it extends, join ``modules`` where they hold Python files; a
    recipe's own folder comes first. A folder that is a package is imported as one."""
    if any(folder.glob("*.py")) and not (folder / "__init__.py").exists():
        found = tree.setdefault("modules", [])
        if isinstance(found, list):
            tree["modules"] = [str(folder), *(place for place in found if place != str(folder))]


def _recipe_file(path: Path) -> Path:
    file = path / "recipe.yaml" if path.is_dir() else path
    if file.is_file():
        return file
    if (shipped := shipped_recipe(str(path))) is not None:
        return shipped
    named = str(path).removeprefix("recipes/")  # its place in a checkout, which is not here
    near = [named] if shipped_recipe(named) else get_close_matches(file.stem, whole_names(), n=1)
    raise ConfigError(
        f"no recipe at {file}{f'; did you mean {near[0]}?' if near else ''}: name a recipe.yaml, a directory that holds one, or "
        f"a recipe that comes with Rollmill: {', '.join(whole_names())}"
    )


def _read(file: Path, seen: tuple[Path, ...]) -> dict[str, Any]:
    file = file.resolve()
    if file in seen:
        raise ConfigError(f"{file} extends itself: {' -> '.join(str(p) for p in (*seen, file))}")
    read = read_yaml(file, own_paths=(file.parent / RESOLVED).exists())
    if not isinstance(read, dict):
        raise ConfigError(f"{file} holds no mapping: a recipe begins with lines such as `name: my-recipe`")
    tree: dict[str, Any] = {str(key): _absolute(value, file.parent) for key, value in read.items()}
    base = tree.pop("extends", None)
    if base is not None:
        try:
            named = parent_of(file, base)
        except OSError as error:  # no path can be as long
            shown = f"{file}: extends names {str(base)[:_MOST_SHOWN]!r}"
            raise ConfigError(f"{shown}: {error.strerror}: write a path, or a name such as base") from None
        parent = _read(named, (*seen, file))
        own_modules, inherited = tree.get("modules"), parent.get("modules")
        tree = inherit(parent, tree)
        if isinstance(own_modules, list) and isinstance(inherited, list):
            tree["modules"] = [*own_modules, *(place for place in inherited if place not in own_modules)]
    _add_modules(tree, file.parent)
    return tree


def _absolute(value: Any, directory: Path) -> Any:
    if isinstance(value, dict):
        return {key: _absolute(item, directory) for key, item in value.items()}
    if isinstance(value, list):
        return [_absolute(item, directory) for item in value]
    if isinstance(value, str) and value.startswith(("./", "../")):
        return str((directory / value).resolve())
    is_in_home = isinstance(value, str) and value.startswith("~") and "/" in value
    return os.path.expanduser(value) if is_in_home else value


def apply_override(tree: dict[str, Any], override: str) -> None:
    """Apply one ``a.b=value`` of ``--set`` to a tree of settings, as a recipe that extends the tree would.

    Raises:
        ConfigError: it is not of that form, or the value is not valid YAML.
    """
    key, equals, text = override.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"--set {override!r}: write it as a.b=value, for example --set run.steps=20")
    path = key.strip().split(".")
    where = f"--set {override[:_MOST_SHOWN]!r}"
    if len(path) > _MOST_DEPTH:
        raise ConfigError(f"{where}: it names more than {_MOST_DEPTH} keys, one below the other: no setting is as deep")
    value = _absolute(_parsed(text, f"{where}: {text[:_MOST_SHOWN]!r}"), Path.cwd())
    if _leads_into_a_list(tree, path):
        set_at(tree, path, value)
        return
    child: Any = value
    for part in reversed(path):
        child = {part: child}
    below = inherit(tree, child)  # another workflow or source of data begins anew
    tree.clear()
    tree.update(below)
    set_at(tree, path, value)  # replaces a mapping as a whole


def _leads_into_a_list(tree: Any, path: Sequence[str]) -> bool:
    """Whether the path has the number of an element of a list, such as ``data.train.0.weight``.

    Raises ``ConfigError`` for a number that the list does not have.
    """
    for place, key in enumerate(path):
        if isinstance(tree, list):
            if not key.isdecimal() or int(key) >= len(tree):
                where = ".".join(path[:place])
                raise ConfigError(
                    f"--set {'.'.join(path)}: {where} is a list of {len(tree)}: write a number from 0 to {len(tree) - 1} after it, "
                    f"or the whole list as {where}=[...]"
                )
            return True
        tree = tree.get(key) if isinstance(tree, dict) else None
    return False


def set_at(tree: Any, path: Sequence[str], value: Any) -> None:
    """Set the value at a path of keys, and of numbers in lists; mappings that are missing on the way are made."""
    for key in path[:-1]:
        if isinstance(tree, list):
            tree = tree[int(key)]
            continue
        child = tree.get(key)
        if not isinstance(child, (dict, list)):
            child = tree[key] = {}
        tree = child
    tree[int(path[-1]) if isinstance(tree, list) else path[-1]] = value


def _apply_ports(tree: dict[str, Any], environment: Mapping[str, str]) -> None:
    for name, path in port_variables(tree).items():
        text = environment.get(name)
        if text is None:
            continue
        if not text.isdigit():
            raise ConfigError(f"the variable {name} is {text!r}; it must be a port number")
        set_at(tree, path, int(text))


def port_variables(tree: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """Environment variable -> path of its port."""
    variables: dict[str, tuple[str, ...]] = {"ORCHESTRATOR_PORT": ("orchestrator", "port")}
    if tree.get("envgateway", {}) is not None:
        variables["ENVGATEWAY_PORT"] = ("envgateway", "port")
        variables["TASK_SERVER_PORT"] = ("envgateway", "task_server", "port")
        variables["CODE_JUDGE_PORT"] = ("envgateway", "http", "port")
    for name in tree.get("inference") or ():
        variables[f"INFERENCE_{_variable(name)}_PORT"] = ("inference", name, "port")
    for name in tree.get("policies") or ():
        variables[f"TRAINER_{_variable(name)}_PORT"] = ("policies", name, "trainer", "port")
        variables[f"WEIGHTS_PORT_{_variable(name)}"] = ("policies", name, "weights", "port")
    return variables


def _variable(name: object) -> str:
    return str(name).upper().replace("-", "_")


def gpu_settings(tree: Mapping[str, Any], environment: Mapping[str, str]) -> list[tuple[tuple[str, ...], Any]]:
    """(path in the recipe, value) of every variable that says which GPUs a process gets: INFERENCE_A_GPUS=0,1,
    TRAINER_MODEL0_GPUS=2,3, ...

    INFERENCE_GPUS and TRAINER_GPUS, without a name, are those of the only service or policy of the recipe. A trainer has
    as many ranks as its variable names GPUs, on each of its nodes.

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


_OLD_PATH = re.compile(r"services(\.\w+)+:\w+(\.\w+)*")


def read_yaml(file: Path, *, own_paths: bool = False) -> Any:
    """The content of the file. ``own_paths``: the file is written by Rollmill, so names of modules of ``services`` are
    allowed.

    Raises:
        ConfigError: no YAML, a key twice in one mapping, or an import path into ``services``; each with its line.
    """
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file} is not valid YAML: {error}") from None
    return _parsed(text, str(file), own_paths)


_NO_VALUE = (ValueError, LookupError, AttributeError, TypeError)  # of PyYAML, for a text that does not fit its tag


class _Loader(yaml.SafeLoader):
    """Raises ``RecursionError`` at a depth that does not depend on the stack of the process."""

    depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        self.depth += 1
        if self.depth > _MOST_DEPTH + 1:
            raise RecursionError
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


def _parsed(text: str, where: str, own_paths: bool = True) -> Any:
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        for key, scalar in _scalars(node, where):
            try:
                loader.construct_object(scalar)
            except _NO_VALUE:  # an integer of thousands of digits, a day that no month has
                raise ConfigError(
                    f"{_line(where, scalar)}: {key or 'it'} is {scalar.value[:50]!r}, which cannot be read as {scalar.tag.rpartition(':')[2]}"
                ) from None
            if not own_paths and _OLD_PATH.fullmatch(scalar.value):
                raise ConfigError(
                    f"{_line(where, scalar)}: {key or scalar.value} names {scalar.value}, an inside of Rollmill: {new_name(scalar.value)}"
                )
        return loader.construct_document(node)
    except yaml.YAMLError as error:
        raise ConfigError(f"{where} is not valid YAML: {error}") from None
    except _NO_VALUE:
        raise ConfigError(f"{where} is not valid YAML: a key is no value of its tag") from None
    except RecursionError:
        raise ConfigError(f"{where} is nested too deeply: no setting is more than {_MOST_DEPTH} deep") from None


def _scalars(node: yaml.Node, file: str, path: str = "", depth: int = 0) -> Iterator[tuple[str, yaml.ScalarNode]]:
    """Every scalar value with its path. Refuses keys that stand twice, and what is too deep or holds itself."""
    if depth > _MOST_DEPTH:
        raise ConfigError(f"{_line(file, node)}: {path[:_MOST_SHOWN]} is more than {_MOST_DEPTH} deep, or holds itself")
    if isinstance(node, yaml.ScalarNode):
        yield path, node
    elif isinstance(node, yaml.SequenceNode):
        for place, item in enumerate(node.value):
            yield from _scalars(item, file, f"{path}[{place}]", depth + 1)
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
            yield from _scalars(value, file, f"{path}.{name}" if path else name, depth + 1)


def _line(file: str, node: yaml.Node) -> str:
    return f"{file}:{node.start_mark.line + 1}"
