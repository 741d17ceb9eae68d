"""Loads a recipe file as a validated ``Recipe``: extends, overrides, variables, and errors with the correction.

Order, later wins: the files named by ``extends``, the recipe itself, ``--set a.b=c`` overrides, environment variables for
GPUs, a ``--profile``, the overrides again, environment variables for ports. ``defaults`` go below all of these (``config.defaults``).
Mappings are merged key by key; lists and scalars replace. A string that begins with ``./`` or
``../`` is a path relative to the file that holds it, in an override to the current directory; one that begins with ``~`` is
in a home. Both become absolute here, for all readers.

Imports neither torch nor grpc: a typo costs a second, not a night.
"""

from __future__ import annotations

import difflib
import json
import os
import threading
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, Tag, ValidationError

from services.common.config.data import merge
from services.common.config.envgateway import EnvGatewayConfig
from services.common.config.recipe import Recipe
from services.common.errors import ConfigError
from services.common.extras import absent
from services.common.importing import look_in

# --- The key ``defaults`` of a recipe: settings of all its policies and of all its inference services, written once.


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


# --- Formats pydantic's errors: path, error, and the setting to write instead.


Location = Sequence[str | int]

# Settings of other systems -> ours, where the names are not alike.
_FOREIGN = {
    "batch_size": "policies.<name>.batch.size", "train_batch_size": "policies.<name>.batch.size",
    "per_device_train_batch_size": "policies.<name>.batch.size", "ppo_mini_batch_size": "policies.<name>.batch.minibatches",
    "learning_rate": "policies.<name>.optimizer.lr", "model_name": "policies.<name>.model.path",
    "model_path": "policies.<name>.model.path", "model_name_or_path": "policies.<name>.model.path",
    "num_generations": "rollout.group_size", "rollout_n": "rollout.group_size", "group_size": "rollout.group_size",
    "max_tokens": "sampling.max_new_tokens", "max_completion_length": "sampling.max_new_tokens",
    "max_length": "policies.<name>.model.context_length", "max_seq_length": "policies.<name>.model.context_length",
    "max_steps": "run.steps", "num_steps": "run.steps", "total_training_steps": "run.steps", "epochs": "run.steps",
    "num_train_epochs": "run.steps", "output_dir": "run.dir", "dataset": "data.train.path", "train_file": "data.train.path",
    "reward_fn": "workflow.settings.reward", "reward_funcs": "workflow.settings.reward", "reward": "workflow.settings.reward",
    "kl_coef": "policies.<name>.algorithm.kl_coefficient", "beta": "policies.<name>.algorithm.kl_coefficient", "loss": "policies.<name>.algorithm.name",
    "eval_steps": "evaluation.every", "save_steps": "policies.<name>.trainer.checkpoint_every",
    "num_workers": "inference.<name>.num_slots",
}  # fmt: skip
_MOST_PLACES = 3  # that a message lists
# Sections of the gateway that are known although the extra may be missing.
_OF_EXTRAS = frozenset(
    ["http", "mcp", "alfworld", "textworld", "webshop", "agentbench", "openenv", "gymnasium", "harbor", "task_server"]
)


def explain(error: ValidationError, root: type[BaseModel]) -> list[str]:
    """One line per problem, with the path as the recipe writes it."""
    return [_explained_line(dict(problem), root) for problem in error.errors()]


def _explained_line(problem: dict[str, Any], root: type[BaseModel]) -> str:
    location = tuple(problem["loc"])
    path = ".".join(_written(root, location))
    kind = problem["type"]
    if kind == "extra_forbidden":
        return f"{path}: {_unknown(str(location[-1]), root, location[:-1])}"
    if kind == "union_tag_invalid":
        return f"{path}.name: {problem['ctx']['tag']!r} is not valid: it should be {problem['ctx']['expected_tags']}"
    if kind == "missing":
        return f"{path}: missing; {_describe(root, location)}"
    message = str(problem["msg"]).removeprefix("Value error, ")
    if kind in ("model_type", "dict_type"):
        message = "Write keys and values below it"
        section, given = _section_at(root, location), problem.get("input")
        if section is not None and "path" in section.model_fields and isinstance(given, str):
            message += f", such as {{path: {given}}}"
    if not location:
        return message
    if kind == "value_error":
        return f"{path}: {message}"
    message = message.replace("Input should be", "it should be").partition(", unable to parse")[0]
    return f"{path}: {_shown(problem.get('input'))} is not valid: {message[0].lower()}{message[1:]}"


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _unknown(key: str, root: type[BaseModel], location: Location) -> str:
    """The error for a key that its section does not have: a key of another member of a union, or of none."""
    members = _members(_annotation_at(root, location[:-1])) if location else {}
    if owners := [name for name, member in members.items() if key in member.model_fields]:
        *others, last = owners
        have = f"{', '.join(others)} and {last} have" if others else f"{last} has"
        return f"{key} is no setting of {location[-1]}; {have} it"
    section = _section_at(root, location)
    if section is None:
        return "unknown key"
    known = list(section.model_fields)
    if section is EnvGatewayConfig and key in _OF_EXTRAS:
        return f"unknown key; {absent('settings', key)}"
    if places := _places_of(key, root):
        return f"unknown key; {key} is written as {' or '.join(places)}"
    close = difflib.get_close_matches(key, known, n=1, cutoff=0.6)
    return "unknown key; " + (f"did you mean {close[0]!r}?" if close else f"write one of {', '.join(known)}")


def _places_of(key: str, root: type[BaseModel]) -> list[str]:
    """Paths of a recipe at which a setting of this name is, or its equal of another system; empty where it is unknown, or
    too common to point at."""
    places = list(_places(root))
    if key in _FOREIGN and any(f"{_FOREIGN[key]}.".startswith(f"{path}.") for path in places):
        return [_FOREIGN[key]]
    found = [path for path in places if path.rpartition(".")[2] == key]
    return found if len(found) <= _MOST_PLACES else []


def _places(section: type[BaseModel], above: str = "") -> Iterator[str]:
    """Every setting and section below a section by its path; names of the user's are ``<name>``."""
    for name, field in section.model_fields.items():
        path, inner = f"{above}{name}", _inner(field.annotation)
        if typing.get_origin(inner) is dict:
            path, inner = f"{path}.<name>", _inner(typing.get_args(inner)[1])
        members = [inner] if isinstance(inner, type) else list(_members(inner).values())
        sections = [member for member in members if isinstance(member, type) and issubclass(member, BaseModel)]
        yield f"{above}{name}"
        yield from dict.fromkeys(place for member in sections for place in _places(member, f"{path}."))


def _describe(root: type[BaseModel], location: tuple[str | int, ...]) -> str:
    section = _section_at(root, location[:-1])
    field = section.model_fields.get(str(location[-1])) if section else None
    text = " ".join((field.description or "").split()) if field else ""
    return f"write it: {text}" if text else "it must be written"


def _section_at(root: type[BaseModel], location: Location) -> type[BaseModel] | None:
    """The section that a path leads to, walking through optional sections, mappings and unions of sections."""
    section = _annotation_at(root, location)
    return section if isinstance(section, type) and issubclass(section, BaseModel) else None


def _annotation_at(root: type[BaseModel], location: Location) -> Any:
    """The type at a path of pydantic; None for a path without a type."""
    section: Any = root
    for part in location:
        if isinstance(section, type) and issubclass(section, BaseModel):
            field = section.model_fields.get(str(part))
            section = _inner(field.annotation) if field else None
        elif typing.get_origin(section) is dict:
            section = _inner(typing.get_args(section)[1])
        elif typing.get_origin(section) is list:
            section = _inner(typing.get_args(section)[0])
        else:
            section = _tagged(section).get(str(part))
    return section


def _written(root: type[BaseModel], location: Location) -> list[str]:
    """The path as a recipe has it: pydantic's has the tag of a union's member too."""
    return [str(part) for i, part in enumerate(location) if not _tagged(_annotation_at(root, location[:i]))]


def _members(annotation: Any) -> dict[str, type[BaseModel]]:
    """Tag -> class of the sections in a union of sections; empty for anything else."""
    return {tag: member for tag, member in _tagged(annotation).items() if isinstance(member, type)}


def _tagged(annotation: Any) -> dict[str, Any]:
    """Tag -> type of the members of a union; empty for anything else."""
    if typing.get_origin(annotation) not in (typing.Union, types.UnionType):
        return {}
    tagged = [typing.get_args(member) for member in typing.get_args(annotation)]
    return {tag.tag: member for member, *marks in filter(None, tagged) for tag in marks if isinstance(tag, Tag)}


def _inner(annotation: Any) -> Any:
    if typing.get_origin(annotation) in (typing.Union, types.UnionType) and not _tagged(annotation):
        return next((a for a in typing.get_args(annotation) if a is not type(None)), None)
    return annotation


# --- ``extends``: finds the recipe that another one names, and merges the two.


RECIPES = Path(__file__).resolve().parents[3] / "recipes"  # those that come with Rollmill


def parent_of(file: Path, extends: object) -> Path:
    """The file that ``extends`` in ``file`` means: a path relative to the file, or the name of a recipe that comes with
    Rollmill, such as ``base`` or ``quickstart``.

    Raises:
        ConfigError: it is neither; with the names that there are.
    """
    if not isinstance(extends, str):
        raise ConfigError(f"{file}: extends must be one path or name, not {extends!r}")
    beside = file.parent / extends  # an absolute path replaces the folder
    for place in (beside, beside / "recipe.yaml"):
        if place.is_file():
            return place
    if is_name(extends) and (shipped := shipped_recipe(extends)) is not None:
        return shipped
    if Path(f"{beside}.yaml").is_file():
        raise ConfigError(f"{file}: extends names {extends!r}; for the file beside it write {extends}.yaml")
    raise ConfigError(
        f"{file}: extends names {extends!r}, and {beside} does not exist: write a path relative to {file.parent}, or the name "
        f"of a recipe that comes with Rollmill: {', '.join(names())}"
    )


def is_name(text: str) -> bool:
    """Whether ``text`` can name a recipe that comes with Rollmill, because it is no path."""
    return not text.endswith((".yaml", ".yml")) and "/" not in text


def shipped_recipe(name: str) -> Path | None:
    """The file of the recipe ``name`` that comes with Rollmill, such as ``quickstart`` or ``one-card/qwen3-0.6b-full``; None if
    there is none."""
    places = (RECIPES / f"{name}.yaml", RECIPES / name / "recipe.yaml")
    return next((place for place in places if place.is_file() and place.resolve().is_relative_to(RECIPES)), None)


def names() -> list[str]:
    """Names of the recipes that come with Rollmill, those that only others extend included."""
    return sorted([file.stem for file in RECIPES.glob("*.yaml")] + whole_names())


def whole_names() -> list[str]:
    """Names of the recipes that come with Rollmill and can run."""
    return sorted(file.parent.name for file in RECIPES.glob("*/recipe.yaml"))


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
        recipe = Recipe.model_validate(tree)
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
    read = read_yaml(file)
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
        tree = merge(parent, tree)
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
    below = merge(tree, child)  # another workflow or source of data begins anew
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
    # A recipe that names no inference service has one, "a".
    for name, gpus in _gpus_of("INFERENCE", tree.get("inference") or ["a"], environment):
        settings.append((("inference", name, "gpus"), gpus))
    policies = spread_defaults(tree).get("policies") or {}
    for name, gpus in _gpus_of("TRAINER", policies, environment):
        nodes = ((policies[name] or {}).get("trainer") or {}).get("nodes")
        num_nodes = (
            len(nodes) if nodes and isinstance(nodes, list) else 1
        )  # an invalid value is refused later, with its path
        settings.append((("policies", name, "trainer", "gpus"), gpus))
        settings.append((("policies", name, "trainer", "num_ranks"), len(gpus) * num_nodes))
    return settings


def _gpus_of(kind: str, names: Iterable[str], environment: Mapping[str, str]) -> Iterator[tuple[str, list[int]]]:
    """Sections of which a variable names the GPUs; a variable of a section goes before the common one."""
    found = {f"{kind}_{_variable(name)}_GPUS": name for name in names}
    common = f"{kind}_GPUS"
    if common in environment:
        if len(found) != 1:
            raise ConfigError(f"the variable {common} does not name a section; set {' and '.join(found)}")
        found = {common: next(iter(found.values())), **found}
    for variable in (variable for variable in found if variable in environment):
        parts = [part.strip() for part in environment[variable].split(",")]
        if not all(part.isdigit() for part in parts):
            raise ConfigError(
                f"the variable {variable} is {environment[variable]!r}; write numbers of GPUs with commas, such as 0,1"
            )
        yield found[variable], [int(part) for part in parts]


def read_yaml(file: Path) -> Any:
    """The content of the file. Raises ``ConfigError`` for what is no YAML and for a key twice in one mapping, with the line."""
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file} is not valid YAML: {error}") from None
    return _parsed(text, str(file))


_NO_VALUE = (ValueError, LookupError, AttributeError, TypeError)  # of PyYAML, for a text that does not fit its tag


def _parsed(text: str, where: str) -> Any:
    try:
        loader = yaml.SafeLoader(text)
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
