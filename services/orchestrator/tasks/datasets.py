"""Opens sources of tasks: a file of rows, a Hugging Face dataset, or a generator named by import path.

Opening a source checks every row once, leaves out unusable rows, counts them and names the first; a source without a
usable row is refused. So a bad row costs neither the run nor a rollout. Independent of the order (``orders``) and
policies.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import structlog

from services.common import reasoning_gym
from services.common.config.data import DatasetConfig
from services.common.errors import ConfigError, DatasetError
from services.common.harbor import task as harbor
from services.common.importing import load_object
from services.common.installing import install
from services.common.records.types import Task
from services.common.user_code import RAISED, check_call, place_of, place_of_error, told
from services.common.verifiers import tasks as verifiers
from services.orchestrator.tasks.catalogue import FORMS, how_to_get, known, local_file
from services.orchestrator.tasks.row_files import is_file_of_rows, open_file
from services.orchestrator.tasks.task_rows import (
    HarborRows,
    HeldOutRows,
    JsonlRows,
    ListRows,
    RawRows,
    RenamedRows,
    Requirement,
    SkippedRows,
    UsableRows,
)

log = structlog.get_logger()

MAX_GENERATED_ROWS = 1_000_000  # a generator without `limit` that yields more is taken for endless


class TaskSource(Protocol):
    """Tasks by row number."""

    @property
    def left_out(self) -> SkippedRows:
        """Rows without a task."""
        ...

    def __len__(self) -> int: ...

    def __getitem__(self, row: int) -> Task: ...


def open_source(
    config: DatasetConfig, seed: int, required: Requirement | None = None, *, evaluates: bool = False
) -> TaskSource:
    """Open the dataset of the config. ``seed`` goes to a generator; ``required`` refuses rows that the recipe cannot
    use; ``evaluates``: of rows with ``hold_out``, those that are held out.

    Raises:
        DatasetError: the dataset is missing, or has no usable row; with the first reasons and their row numbers.
    """
    config = config.model_copy(update={"limit": config.num_read(held_out=evaluates)})
    if config.name is not None:
        return _from_catalogue(config, config.name, required, evaluates)
    rows = _rows(config, seed)
    if config.columns:
        rows = RenamedRows(rows, config.columns)
    id_field = config.id_field or (harbor.TASK_FIELD if config.harbor is not None else None)
    return UsableRows(_split(rows, config, evaluates), id_field, FORMS[config.form] if config.form else None, required)


def log_opened(where: str, source: TaskSource) -> None:
    """Log how many tasks a section's dataset has, and the rows left out."""
    event = log.warning if source.left_out.count else log.info
    event("dataset.opened", dataset=where, rows=len(source), left_out=source.left_out.count,
          reasons=source.left_out.reasons)  # fmt: skip


def _rows(config: DatasetConfig, seed: int) -> RawRows:
    if config.verifiers is not None:
        tasks = verifiers.rows(config.verifiers, config.settings, config.limit)
        return ListRows(list(tasks), f"verifiers environment {config.verifiers}")
    if config.reasoning_gym is not None:
        return _from_reasoning_gym(config, config.reasoning_gym, seed)
    if config.harbor is not None:
        return HarborRows(list(islice(harbor.rows(config.harbor), config.limit)), f"harbor {config.harbor}")
    if config.generator is not None:
        return _generated(config, seed)
    return _from_path(config)


def _from_path(config: DatasetConfig) -> RawRows:
    assert config.path is not None
    path = Path(config.path)
    if is_file_of_rows(config.path) and path.suffix != ".parquet":
        return open_file(path, config.limit)
    if path.suffix == ".parquet" and not path.is_file():
        raise DatasetError(f"dataset file {path} does not exist")
    return _from_hugging_face(config)


def _split(rows: RawRows, config: DatasetConfig, evaluates: bool) -> RawRows:
    """The rows that ``hold_out`` leaves to training, or holds out."""
    if config.hold_out is None:
        return rows
    found = HeldOutRows(rows, config.hold_out, held_out=evaluates)
    if not len(found):
        raise DatasetError(
            f"{rows.name} has {len(rows)} rows, and hold_out {config.hold_out} leaves none: write a smaller number, or "
            "hold_out: null where a recipe above sets it"
        )
    return found


def _from_catalogue(config: DatasetConfig, name: str, required: Requirement | None, evaluates: bool) -> TaskSource:
    entry = known(name)
    if entry.indices is not None:
        indices = [{"index": index} for index in entry.indices[: config.limit]]
        chosen = _split(ListRows(indices, f"dataset {name}"), config, evaluates)
        return UsableRows(chosen, config.id_field or "index", None, required)
    path = local_file(name)
    if path is not None:
        rows: RawRows = JsonlRows(path, config.limit, f"dataset {name} ({path})")
    elif entry.hub is None:
        raise DatasetError(how_to_get(name))
    else:
        subset = config.subset or entry.subset
        hub = config.model_copy(update={"path": entry.hub, "subset": subset, "split": entry.split})
        try:
            rows = _from_hugging_face(hub)
        except DatasetError as error:
            raise DatasetError(f"{how_to_get(name)}. {error.message}") from error
    return UsableRows(_split(rows, config, evaluates), config.id_field, entry.normalise, required)


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


def _from_reasoning_gym(config: DatasetConfig, name: str, seed: int) -> ListRows:
    rows = reasoning_gym.rows(name, config.size, seed, config.settings)
    return ListRows(list(islice(rows, config.limit)), f"reasoning-gym {name}")


def _from_hugging_face(config: DatasetConfig) -> ListRows:
    try:
        import datasets
    except ImportError as error:
        raise DatasetError(
            f"dataset {config.path!r} is no jsonl file, and the package `datasets` is not installed: "
            f"{install('orchestrator')}"
        ) from error
    assert config.path is not None
    load = functools.partial(datasets.load_dataset, config.path, config.subset, split=config.split)
    if Path(config.path).suffix == ".parquet" and Path(config.path).is_file():
        load = functools.partial(datasets.load_dataset, "parquet", data_files=config.path, split="train")
    elif Path(config.path, "dataset_info.json").is_file() or Path(config.path, "state.json").is_file():
        load = functools.partial(datasets.load_from_disk, config.path)
    elif Path(config.path, "dataset_dict.json").is_file():
        load = functools.partial(_from_saved_dict, config.path, config.split)
    try:
        rows = load()
    except (OSError, ValueError, KeyError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        # RuntimeError: a script, which `datasets` does not run.
        raise DatasetError(f"dataset {config.path!r} (split {config.split!r}) cannot be loaded: {error}") from error
    if config.limit is not None:
        rows = rows.select(range(min(config.limit, len(rows))))
    return ListRows(rows, f"dataset {config.path}")


def _from_saved_dict(path: str, split: str) -> Any:
    import datasets

    return datasets.load_from_disk(path)[split]
