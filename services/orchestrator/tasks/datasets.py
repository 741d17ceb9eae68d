"""Opens sources of tasks: a file of rows, a Hugging Face dataset, or a generator named by import path.

Opening a source checks every row once, leaves out unusable rows, counts them and names the first; a source without a
usable row is refused. So a bad row costs neither the run nor a rollout. Independent of the order (``orders``) and
policies.
"""

from __future__ import annotations

import codecs
import csv
import functools
import io
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import orjson

from services.common.config.data import DatasetConfig, is_training
from services.common.config.recipe import Recipe
from services.common.dataset_rows import (
    HARBOR,
    TEST_KINDS,
    TRUTH_FIELDS,
    BuiltInReward,
    BuiltInWorkflow,
    prompt_in,
    truth_in,
)
from services.common.errors import ConfigError, DatasetError
from services.common.extras import absent, load_extra, provided
from services.common.importing import RAISED, check_call, load_object, place_of, place_of_error, told
from services.common.installing import install
from services.common.text.asserted_calls import asserted_calls
from services.common.text.programs import UnusableTestsError, names_of
from services.orchestrator.tasks.rows import (
    FORMS,
    JsonlRows,
    ListRows,
    Requirement,
    Rows,
    UsableRows,
    exact_json,
    how_to_get,
    known,
    local_file,
    renamed_rows,
    split_rows,
)

# --- Opens files of rows by their names: JSON Lines, one JSON array, CSV and TSV. Parquet is read by ``datasets``.


LINES, JSON, TABLES = (".jsonl", ".ndjson"), ".json", {".csv": ",", ".tsv": "\t"}
KINDS = (*LINES, JSON, *TABLES, ".parquet")
_PACKED = (".gz", ".zip", ".bz2", ".xz", ".zst")
_LONGEST_FIELD = 1 << 30  # characters of one field of a table; the module's own bound is 128 KiB
_HEAD = 1 << 16  # bytes that are read to tell the kind of a JSON file


def is_file_of_rows(path: str) -> bool:
    """Whether a dataset's path means a file, and not a directory or the name of a dataset on the hub."""
    place = Path(path)
    return place.is_file() or place.suffix.lower() in KINDS or (path.startswith(("/", ".")) and not place.is_dir())


def open_file(path: Path, limit: int | None) -> Rows:
    """The rows of a file; ``limit`` takes the first ones only.

    Raises:
        DatasetError: there is no such file, it is of no kind that is read, or its shape is wrong; with the remedy.
    """
    name, suffix = f"dataset file {path}", path.suffix.lower()
    if not path.is_file():
        raise DatasetError(f"{name} does not exist: write the path of a file, relative to the recipe with ./ before it")
    if suffix in _PACKED:
        raise DatasetError(f"{name} is packed: unpack it first")
    if suffix in TABLES:
        return ListRows(list(_table(path, TABLES[suffix], limit, name)), name)
    if suffix == JSON and (rows := _array(path, name)) is not None:
        return ListRows(rows[:limit], name)
    if suffix in (*LINES, JSON):
        return JsonlRows(path, limit, name)
    raise DatasetError(f"{name} is of no kind that is read: write a file that ends with {', '.join(KINDS)}")


def _table(path: Path, delimiter: str, limit: int | None, name: str) -> Iterator[Mapping[str, Any]]:
    """Rows of a CSV or TSV file by its header; every value is text."""
    csv.field_size_limit(_LONGEST_FIELD)
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise DatasetError(f"{name} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise DatasetError(f"{name} is not in UTF-8 ({error.reason} at byte {error.start}): save it in UTF-8") from None
    lines = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    try:
        header = next(lines, None)
        if header is None:
            return
        _check_header([column.strip() for column in header], name, delimiter)
        names = [column.strip() for column in header]
        for number, values in enumerate((line for line in lines if line), start=1):
            if limit is not None and number > limit:
                return
            if len(values) != len(names):
                raise DatasetError(
                    f"{name}, line {lines.line_num}: {len(values)} values, and the header names {len(names)} columns "
                    f"({', '.join(names)}): put values that hold a {delimiter!r} between quotes"
                )
            yield dict(zip(names, values, strict=True))
    except csv.Error as error:
        raise DatasetError(f"{name}, line {lines.line_num}: {error}: is a quote missing?") from None


def _check_header(names: list[str], name: str, delimiter: str) -> None:
    if len(names) == 1 and any(other in names[0] for other in ";,\t|"):
        raise DatasetError(f"{name}: the header is one column, {names[0]!r}: separate columns with {delimiter!r}")
    empty = [place for place, column in enumerate(names, start=1) if not column]
    if empty:
        raise DatasetError(f"{name}: column {empty[0]} has no name in the header, which is its first line: name it")
    twice = next((column for column in names if names.count(column) > 1), None)
    if twice is not None:
        raise DatasetError(f"{name}: the header names {twice!r} twice: give one of them another name")


def _array(path: Path, name: str) -> list[Any] | None:
    """The rows of a file that is one JSON array; None for a file of JSON Lines.

    Raises:
        DatasetError: the file is one JSON object, or an array with an element that is no object.
    """
    try:
        with path.open("rb") as file:
            head = file.read(_HEAD).removeprefix(codecs.BOM_UTF8).lstrip()
        is_array = head.startswith(b"[")
        if not is_array and (not head.startswith(b"{") or _is_json(head.partition(b"\n")[0])):
            return None  # an object in the first line: JSON Lines
        tree = exact_json(path.read_bytes().removeprefix(codecs.BOM_UTF8))
    except OSError as error:
        raise DatasetError(f"{name} cannot be read: {error.strerror}") from error
    except (orjson.JSONDecodeError, RecursionError) as error:
        if not is_array:
            return None  # lines are then told one by one
        raise DatasetError(f"{name} begins as a JSON array and is not valid JSON: {error}") from None
    if isinstance(tree, dict):
        inside = [key for key, value in tree.items() if isinstance(value, list)]
        where = f"; its rows seem to be under {inside[0]!r}" if inside else ""
        raise DatasetError(
            f"{name} is one JSON object, not rows{where}: write an array of objects, or one object per line"
        )
    wrong = next((number for number, row in enumerate(tree, start=1) if not isinstance(row, dict)), None)
    if wrong is not None:
        raise DatasetError(
            f"{name}, element {wrong}: a row must be a JSON object, not {type(tree[wrong - 1]).__name__}"
        )
    return list(tree)


def _is_json(line: bytes) -> bool:
    try:
        orjson.loads(line)
    except orjson.JSONDecodeError:
        return False
    return True


MAX_GENERATED_ROWS = 1_000_000  # a generator without `limit` that yields more is taken for endless


def open_source(
    config: DatasetConfig, seed: int, required: Requirement | None = None, *, evaluates: bool = False
) -> UsableRows:
    """Open the dataset of the config. ``seed`` goes to a generator; ``required`` refuses rows that the recipe cannot
    use; ``evaluates``: of rows with ``hold_out``, those that are held out.

    Raises:
        DatasetError: the dataset is missing, or has no usable row; with the first reasons and their row numbers.
    """
    config = config.model_copy(update={"limit": config.num_read(held_out=evaluates)})
    id_field, form = "task" if config.harbor is not None else None, FORMS.get(config.form or "")
    if config.name is not None:
        entry = known(config.name)
        rows, form, id_field = _known_rows(config, config.name), entry.normalise, "index" if entry.indices else None
    else:
        rows = _rows(config, seed)
    if config.columns:
        rows = renamed_rows(rows, config.columns)
    if config.hold_out is not None:
        whole, rows = len(rows), split_rows(rows, config.hold_out, held_out=evaluates)
        if not len(rows):
            raise DatasetError(
                f"{rows.name} has {whole} rows, and hold_out {config.hold_out} leaves none: write a smaller number, or "
                "hold_out: null where a recipe above sets it"
            )
    return UsableRows(rows, config.id_field or id_field, form, required)


def _rows(config: DatasetConfig, seed: int) -> Rows:
    for extra in ("verifiers", "reasoning_gym", "harbor"):
        if getattr(config, extra) is not None:
            return _from_extra(config, extra, seed)
    if config.generator is not None:
        return _generated(config, seed)
    assert config.path is not None
    path = Path(config.path)
    if is_file_of_rows(config.path) and path.suffix != ".parquet":
        return open_file(path, config.limit)
    if path.suffix == ".parquet" and not path.is_file():
        raise DatasetError(f"dataset file {path} does not exist")
    return _from_hugging_face(config)


def _known_rows(config: DatasetConfig, name: str) -> Rows:
    """The rows of a dataset that is known by name."""
    entry = known(name)
    if entry.indices is not None:
        return ListRows([{"index": index} for index in entry.indices[: config.limit]], f"dataset {name}")
    path = local_file(name)
    if path is not None:
        return JsonlRows(path, config.limit, f"dataset {name} ({path})")
    if entry.hub is None:
        raise DatasetError(how_to_get(name))
    hub = {"path": entry.hub, "subset": config.subset or entry.subset, "split": entry.split}
    try:
        return _from_hugging_face(config.model_copy(update=hub))
    except DatasetError as error:
        raise DatasetError(f"{how_to_get(name)}. {error.message}") from error


def _generated(config: DatasetConfig, seed: int) -> ListRows:
    assert config.generator is not None
    function: Callable[..., Iterator[Mapping[str, Any]]] = load_object(config.generator)
    name = f"generator {config.generator}"
    settings = "".join(f", {key}" for key in config.settings)
    try:
        check_call(function, name, f"def rows(seed{settings})", keywords={"seed": seed, **config.settings})
    except ConfigError as error:
        raise DatasetError(error.message) from None
    try:
        rows = list(islice(function(seed=seed, **config.settings), config.limit or MAX_GENERATED_ROWS + 1))
    except RAISED as error:  # the user's code, which can raise anything
        raised = f"raised {told(error)}".rstrip(": ")
        raise DatasetError(
            f"{place_of_error(error) or place_of(function)}{name} {raised} (seed {seed}, settings {config.settings})"
        ) from error
    if config.limit is None and len(rows) > MAX_GENERATED_ROWS:
        raise DatasetError(f"{place_of(function)}{name} yields more than {MAX_GENERATED_ROWS} rows: set `limit`")
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, Mapping):
            raise DatasetError(
                f"{place_of(function)}{name}, row {number}: a row must be a mapping, not {type(row).__name__}"
            )
    return ListRows(rows, name)


def _from_extra(config: DatasetConfig, extra: str, seed: int) -> ListRows:
    """Rows of tasks of others: verifiers environments, tasks of reasoning-gym, directories of Harbor."""
    if extra not in provided("datasets"):
        raise DatasetError(f"{extra}: {absent('datasets', extra)}")
    rows: Callable[[DatasetConfig, int], Iterator[Mapping[str, Any] | DatasetError]] = load_extra("datasets", extra)
    return ListRows(list(islice(rows(config, seed), config.limit)), f"{extra} {getattr(config, extra)}")


def _from_hugging_face(config: DatasetConfig) -> ListRows:
    try:
        import datasets
    except ImportError as error:
        raise DatasetError(
            f"dataset {config.path!r} is no jsonl file, and the package `datasets` is not installed: "
            f"{install('orchestrator')}"
        ) from error
    assert config.path is not None
    load: Callable[[], Any] = functools.partial(datasets.load_dataset, config.path, config.subset, split=config.split)
    if Path(config.path).suffix == ".parquet" and Path(config.path).is_file():
        load = functools.partial(datasets.load_dataset, "parquet", data_files=config.path, split="train")
    elif Path(config.path, "dataset_info.json").is_file() or Path(config.path, "state.json").is_file():
        load = functools.partial(datasets.load_from_disk, config.path)
    elif Path(config.path, "dataset_dict.json").is_file():
        load = lambda: datasets.load_from_disk(config.path)[config.split]  # noqa: E731
    try:
        rows = load()
    except (OSError, ValueError, KeyError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        # RuntimeError: a script, which `datasets` does not run.
        raise DatasetError(f"dataset {config.path!r} (split {config.split!r}) cannot be loaded: {error}") from error
    if config.limit is not None:
        rows = rows.select(range(min(config.limit, len(rows))))
    return ListRows(rows, f"dataset {config.path}")


# --- Checks dataset rows against the built-in workflows and rewards of a recipe at the start of the run.


WITH_PROMPT = (
    BuiltInWorkflow.SINGLE_TURN,
    BuiltInWorkflow.TOOL_USE,
    BuiltInWorkflow.TOOL_MATH,
    BuiltInWorkflow.ACTOR_VERIFIER,
    BuiltInWorkflow.CODEGEN_VERIFIER,
)


def requirement(recipe: Recipe, section: str) -> Callable[[Mapping[str, Any], str], None]:
    """A check of one row; raises ``DatasetError`` for a row that the section's workflow or its reward cannot use."""
    workflow = recipe.workflow_of(section)
    field = workflow.settings.get("prompt_field")
    reward = workflow.reward
    opaque_tests = recipe.data.sections()[section].opaque_tests or ("leave_out" if is_training(section) else "together")
    harbor = None if recipe.envgateway is None else recipe.envgateway.extra("harbor")
    skips_run = harbor is not None and harbor.skip_run

    def check(row: Mapping[str, Any], where: str) -> None:
        if not skips_run and HARBOR in row and (refusal := row[HARBOR]["refusal"]):
            raise DatasetError(refusal)
        tests, environment = row.get("tests"), row.get("environment")
        by_environment = environment.get("reward") if isinstance(environment, Mapping) else None
        if opaque_tests == "leave_out" and BuiltInReward.CODE in (reward, by_environment) and are_opaque(tests):
            raise DatasetError(
                f"{where}: its test code cannot be read as calls and values, so programs could forge their verdict: write "
                f"{section}.opaque_tests: together to use such rows all the same"
            )
        if workflow.name in WITH_PROMPT:
            prompt_in(row, field, where)
        if reward in (BuiltInReward.MATH, BuiltInReward.BOXED) and truth_in(row) is None:
            fields = ", ".join(TRUTH_FIELDS)
            raise DatasetError(
                f"{where} has no answer: looked for {fields} and reward_model.ground_truth in {sorted(row)}"
            )
        if reward == BuiltInReward.REASONING_GYM and BuiltInReward.REASONING_GYM not in row:
            raise DatasetError(
                f"{where} is no task of reasoning-gym, which alone the reward reasoning_gym scores: name another reward, or "
                "rows with data.train.reasoning_gym"
            )
        if reward == BuiltInReward.CODE and not (isinstance(tests, Mapping) and tests.get("kind") in TEST_KINDS):
            raise DatasetError(
                f"{where} has no tests with a kind of {', '.join(TEST_KINDS)}; rows of other layouts are read with form: code"
            )
        if reward == BuiltInReward.CODE and isinstance(tests, Mapping) and (why := why_tests_are_unusable(tests)):
            raise DatasetError(f"{where}: {why}")

    return check


def are_opaque(tests: Any) -> bool:
    """Whether tests of a row are usable, and can be judged in the process of the program only."""
    is_code = isinstance(tests, Mapping) and tests.get("kind") == "assert"
    return is_code and not why_tests_are_unusable(tests) and asserted_calls(*_parts(tests)) is None


def why_tests_are_unusable(tests: Mapping[str, Any]) -> str:
    """Reason for which a row's tests cannot judge a program; empty for usable tests, as far as their text shows."""
    if tests.get("kind") != "assert":
        cases = tests.get("cases")
        return "" if isinstance(cases, list) and cases else "its tests have no cases"
    *parts, names = _parts(tests)
    if not all(isinstance(part, str) for part in (*parts, *names)):
        return "tests, entry_point, preamble and each of names must be text"
    try:
        names_of(*parts, names)
    except UnusableTestsError as error:
        return str(error)
    return ""


def _parts(tests: Mapping[str, Any]) -> tuple[Any, Any, Any, tuple[Any, ...]]:
    return tests.get("tests"), tests.get("entry_point", ""), tests.get("preamble", ""), tuple(tests.get("names", ()))
