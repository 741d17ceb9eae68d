"""From a recipe file to a validated ``Recipe``: extends, overrides, variables, and errors that say what to write.

Order, later wins: the files named by ``extends``, the recipe itself, ``--set a.b=c`` overrides, environment variables for
GPUs, a ``--profile``, the overrides again, environment variables for ports. ``defaults`` go below all of these (``config.defaults``).
Mappings are merged key by key; lists and scalars replace. A string that begins with ``./`` or
``../`` is a path relative to the file that holds it.

Imports neither torch nor grpc: a typo costs a second, not a night.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from services.common.config.defaults import merge, spread_defaults
from services.common.config.explain import explain
from services.common.config.gpu_variables import gpu_settings
from services.common.config.recipe import Recipe
from services.common.errors import ConfigError

RESOLVED = "recipe.json"

Profile = Callable[[dict[str, Any]], dict[str, Any]]


def load_recipe(
    path: Path,
    overrides: Sequence[str] = (),
    environment: Mapping[str, str] = os.environ,
    profile: Profile | None = None,
) -> Recipe:
    """Read and validate a recipe (a file, or a directory that holds ``recipe.yaml``).

    ``profile`` transforms the whole of it, and may run it elsewhere than on the GPUs that variables name; overrides count
    before it and, but for ``data``, once more after it.

    Raises:
        ConfigError: with one line per problem: the path in the recipe, what is wrong, what to write instead.
    """
    tree = _read(_recipe_file(path), seen=())
    for override in overrides:
        _apply_override(tree, override)
    for variable_path, gpus in gpu_settings(tree, environment):
        _set(tree, variable_path, gpus)
    if profile is not None:
        tree = profile(validate(spread_defaults(tree), source=str(path)).model_dump(mode="json"))
        for override in overrides:
            if not override.strip().startswith("data."):  # the profile has replaced whole datasets
                _apply_override(tree, override)
    _apply_ports(tree, environment)
    return validate(spread_defaults(tree), source=str(path))


def validate(tree: Mapping[str, Any], source: str) -> Recipe:
    """Validate a merged tree; ``source`` is named in the error."""
    try:
        return Recipe.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(
            f"{source} cannot run:\n" + "\n".join(f"  {line}" for line in explain(error, Recipe))
        ) from None


def save_resolved(recipe: Recipe, run_dir: Path) -> None:
    """Write the resolved recipe into the run directory, as JSON for processes and as YAML for people."""
    run_dir.mkdir(parents=True, exist_ok=True)
    tree = recipe.model_dump(mode="json")
    (run_dir / "recipe.yaml").write_text(yaml.safe_dump(tree, sort_keys=False, allow_unicode=True))
    # Several processes of a split launch may write it at once.
    partial = run_dir / f"{RESOLVED}.{os.getpid()}-{threading.get_ident()}.partial"
    partial.write_text(json.dumps(tree, indent=1))
    partial.replace(run_dir / RESOLVED)


def load_resolved(run_dir: Path) -> Recipe:
    """Read what ``save_resolved`` wrote; raises ``ConfigError`` when the directory is no run directory, a damaged one, or one
    of a version with other settings."""
    path = run_dir / RESOLVED
    if not path.is_file():
        raise ConfigError(
            f"{run_dir} is no run directory: {RESOLVED} is missing; start a run with `millrace run RECIPE`"
        )
    try:
        tree = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path} cannot be read ({error}): put back what was saved when the run began, or start another run"
        ) from None
    try:
        return validate(tree, source=str(path))
    except ConfigError as error:
        raise ConfigError(
            f"{error.message}\n  If nobody changed the file, another version of Millrace began this run, with other settings: "
            "use that version for it, or start another run"
        ) from None


def with_run_id(recipe: Recipe, now: datetime | None = None) -> Recipe:
    """The same recipe with ``run.id`` set: its own, or name and time."""
    if recipe.run.id:
        return recipe
    stamp = (now or datetime.now()).strftime("%Y%m%d-%H%M%S")
    return recipe.model_copy(update={"run": recipe.run.model_copy(update={"id": f"{recipe.name}-{stamp}"})})


def _recipe_file(path: Path) -> Path:
    file = path / "recipe.yaml" if path.is_dir() else path
    if not file.is_file():
        raise ConfigError(
            f"no recipe at {file}: name a recipe.yaml or a directory that holds one, such as recipes/quickstart"
        )
    return file


def _read(file: Path, seen: tuple[Path, ...]) -> dict[str, Any]:
    file = file.resolve()
    if file in seen:
        raise ConfigError(f"{file} extends itself: {' -> '.join(str(p) for p in (*seen, file))}")
    try:
        tree = yaml.safe_load(file.read_text())
    except yaml.YAMLError as error:
        raise ConfigError(f"{file} is not valid YAML: {error}") from None
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"{file} holds no mapping: a recipe begins with lines such as `name: my-recipe`")
    tree = {str(key): _absolute(value, file.parent) for key, value in tree.items()}
    base = tree.pop("extends", None)
    if base is None:
        return tree
    if not isinstance(base, str):
        raise ConfigError(f"{file}: extends must be one path, not {base!r}")
    parent = Path(base) if Path(base).is_absolute() else file.parent / base
    if not parent.is_file():
        raise ConfigError(f"{file}: extends names {parent}, which does not exist")
    merged: dict[str, Any] = merge(_read(parent, (*seen, file)), tree)
    return merged


def _absolute(value: Any, directory: Path) -> Any:
    if isinstance(value, dict):
        return {key: _absolute(item, directory) for key, item in value.items()}
    if isinstance(value, list):
        return [_absolute(item, directory) for item in value]
    if isinstance(value, str) and value.startswith(("./", "../")):
        return str((directory / value).resolve())
    return value


def _apply_override(tree: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"--set {override!r}: write it as a.b=value, for example --set run.steps=20")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        raise ConfigError(f"--set {override!r}: {text!r} is not valid YAML") from None
    _set(tree, key.strip().split("."), value)


def _set(tree: dict[str, Any], path: Sequence[str], value: Any) -> None:
    for key in path[:-1]:
        child = tree.get(key)
        if not isinstance(child, dict):
            child = tree[key] = {}
        tree = child
    tree[path[-1]] = value


def _apply_ports(tree: dict[str, Any], environment: Mapping[str, str]) -> None:
    for name, path in port_variables(tree).items():
        text = environment.get(name)
        if text is None:
            continue
        if not text.isdigit():
            raise ConfigError(f"the variable {name} is {text!r}; it must be a port number")
        _set(tree, path, int(text))


def port_variables(tree: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """Environment variable -> path of the port that it sets."""
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
