"""Where tasks come from: a jsonl file, a Hugging Face dataset, or a generator named by import path.

Every row is looked at once when the source is opened, so a bad row is an error at start and not in mid-run; a jsonl
file is streamed and only line offsets stay in memory. Knows nothing about order (``curriculum``) or policies.
"""

from __future__ import annotations

import functools
import os
import weakref
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import orjson
import structlog

from services.common.config.data import DatasetConfig
from services.common.errors import DatasetError
from services.common.importing import load_object
from services.common.types import Task
from services.orchestrator.catalogue import Normalise, how_to_get, known, local_file

log = structlog.get_logger()

MAX_GENERATED_ROWS = 1_000_000  # a generator without `limit` that yields more is taken for endless


class TaskSource(Protocol):
    """Tasks by row number."""

    def __len__(self) -> int: ...

    def __getitem__(self, row: int) -> Task: ...


def open_source(config: DatasetConfig, seed: int) -> TaskSource:
    """Open what the config names. ``seed`` goes to a generator.

    Raises:
        DatasetError: with file and row number.
    """
    if config.generator is not None:
        return _from_generator(config, seed)
    if config.name is not None:
        return _from_catalogue(config, config.name)
    assert config.path is not None
    path = Path(config.path)
    if path.suffix in (".jsonl", ".json", ".ndjson") and path.is_file():
        return JsonlSource(path, config.id_field, config.limit)
    if path.suffix in (".jsonl", ".ndjson") or (path.suffix == ".parquet" and not path.is_file()):
        raise DatasetError(f"dataset file {path} does not exist")
    return _from_hugging_face(config)


class JsonlSource:
    """One JSON object per line, read on demand by offset."""

    def __init__(self, path: Path, id_field: str | None, limit: int | None) -> None:
        self._path = path
        self._id_field = id_field
        offsets: list[int] = []
        lengths: list[int] = []
        rows: list[int] = []
        seen: dict[str, int] = {}
        try:
            with path.open("rb") as file:
                offset = 0
                for number, line in enumerate(file, start=1):
                    if limit is not None and len(offsets) >= limit:
                        break
                    if line.strip():
                        where = f"{path}, row {number}"
                        _named(_parse(line, where), id_field, number, where, seen)
                        offsets.append(offset)
                        lengths.append(len(line))
                        rows.append(number)
                    offset += len(line)
        except OSError as error:
            raise DatasetError(f"dataset file {path} cannot be read: {error.strerror}") from error
        if not offsets:
            raise DatasetError(f"dataset file {path} holds no rows")
        self._offsets = np.asarray(offsets, dtype=np.int64)
        self._lengths = np.asarray(lengths, dtype=np.int32)
        self._numbers = np.asarray(rows, dtype=np.int64)
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)  # stays readable even when the file is replaced
        weakref.finalize(self, os.close, self._fd)

    def __len__(self) -> int:
        return len(self._offsets)

    def __getitem__(self, row: int) -> Task:
        number = int(self._numbers[row])
        where = f"{self._path}, row {number}"
        data = _parse(os.pread(self._fd, int(self._lengths[row]), int(self._offsets[row])), where)
        return Task(task_id=_task_id(data, self._id_field, number, where), data=data)


class ListSource:
    """Rows held in memory, numbered from 1 in errors and ids."""

    def __init__(self, rows: list[Mapping[str, Any]], id_field: str | None, name: str) -> None:
        if not rows:
            raise DatasetError(f"dataset {name} holds no rows")
        self._rows, self._id_field, self._name = rows, id_field, name
        seen: dict[str, int] = {}
        for number, data in enumerate(rows, start=1):
            where = f"{name}, row {number}"
            _as_json(data, where)
            _named(data, id_field, number, where, seen)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, row: int) -> Task:
        data = self._rows[row]
        return Task(task_id=_task_id(data, self._id_field, row + 1, f"{self._name}, row {row + 1}"), data=data)


class MappedSource:
    """Rows of a Hugging Face dataset, which stays on disk; checked when drawn."""

    def __init__(self, rows: Any, id_field: str | None, name: str) -> None:
        if not len(rows):
            raise DatasetError(f"dataset {name} holds no rows")
        if id_field is not None and id_field not in rows.column_names:
            raise DatasetError(f"dataset {name} has no column {id_field!r}; it has {', '.join(rows.column_names)}")
        self._rows, self._id_field, self._name = rows, id_field, name

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, row: int) -> Task:
        where = f"dataset {self._name}, row {row + 1}"
        data = _parse(_as_json(self._rows[row], where), where)
        return Task(task_id=_task_id(data, self._id_field, row + 1, where), data=data)


class NormalisedSource:
    """Rows of another source in one form; rows that are left out are counted once, when it is opened."""

    def __init__(self, source: TaskSource, normalise: Normalise, name: str) -> None:
        self._source, self._normalise, self._name = source, normalise, name
        self._rows = [row for row in range(len(source)) if self._normal(row) is not None]
        self.num_left_out = len(source) - len(self._rows)
        if not self._rows:
            raise DatasetError(f"dataset {name} holds no row that can be used ({len(source)} looked at)")
        log.info("dataset.opened", dataset=name, rows=len(self._rows), left_out=self.num_left_out)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, row: int) -> Task:
        place = self._rows[row]
        data = self._normal(place)
        assert data is not None, "looked at when the source was opened"
        return Task(task_id=self._source[place].task_id, data=data)

    def _normal(self, place: int) -> dict[str, Any] | None:
        return self._normalise(self._source[place].data, f"dataset {self._name}, row {place + 1}")


def _from_catalogue(config: DatasetConfig, name: str) -> TaskSource:
    entry = known(name)
    if entry.indices is not None:
        return ListSource(
            [{"index": index} for index in entry.indices[: config.limit]], config.id_field or "index", name
        )
    path = local_file(name)
    if path is not None:
        source: TaskSource = JsonlSource(path, config.id_field, config.limit)
    elif entry.hub is None:
        raise DatasetError(how_to_get(name))
    else:
        hub = config.model_copy(update={"path": entry.hub, "subset": entry.subset, "split": entry.split})
        try:
            source = _from_hugging_face(hub)
        except DatasetError as error:
            raise DatasetError(f"{how_to_get(name)}. {error.message}") from error
    return source if entry.normalise is None else NormalisedSource(source, entry.normalise, name)


def _from_generator(config: DatasetConfig, seed: int) -> TaskSource:
    assert config.generator is not None
    function: Callable[..., Iterator[Mapping[str, Any]]] = load_object(config.generator)
    name = f"generator {config.generator}"
    try:
        rows = list(islice(function(seed=seed, **config.settings), config.limit or MAX_GENERATED_ROWS + 1))
    except (TypeError, ValueError) as error:  # wrong keyword, or a setting that it refuses
        raise DatasetError(f"{name} failed with settings {config.settings}: {error}") from error
    if config.limit is None and len(rows) > MAX_GENERATED_ROWS:
        raise DatasetError(f"{name} yields more than {MAX_GENERATED_ROWS} rows: set `limit`")
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, Mapping):
            raise DatasetError(f"{name}, row {number}: a row must be a mapping, not {type(row).__name__}")
    return ListSource(rows, config.id_field, name)


def _from_hugging_face(config: DatasetConfig) -> TaskSource:
    try:
        import datasets
    except ImportError as error:
        raise DatasetError(
            f"dataset {config.path!r} is no jsonl file, and the package `datasets` is not installed: "
            "pip install 'millrace[orchestrator]'"
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
    except (OSError, ValueError, KeyError, datasets.exceptions.DatasetsError) as error:
        raise DatasetError(f"dataset {config.path!r} (split {config.split!r}) cannot be loaded: {error}") from error
    if config.limit is not None:
        rows = rows.select(range(min(config.limit, len(rows))))
    return MappedSource(rows, config.id_field, config.path)


def _from_saved_dict(path: str, split: str) -> Any:
    import datasets

    return datasets.load_from_disk(path)[split]


def _parse(line: bytes, where: str) -> Mapping[str, Any]:
    try:
        data = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise DatasetError(f"{where}: not valid JSON: {error}") from None
    if not isinstance(data, dict):
        raise DatasetError(f"{where}: a row must be a JSON object, not {type(data).__name__}")
    return data


def _as_json(data: Mapping[str, Any], where: str) -> bytes:
    try:
        return orjson.dumps(data)
    except orjson.JSONEncodeError as error:
        raise DatasetError(f"{where}: cannot be written as JSON: {error}") from None


def _named(data: Mapping[str, Any], id_field: str | None, number: int, where: str, seen: dict[str, int]) -> None:
    if id_field is None:
        return
    name = _task_id(data, id_field, number, where)
    if name in seen:
        raise DatasetError(f"{where}: {id_field} {name!r} was used in row {seen[name]}; task ids must be unique")
    seen[name] = number


def _task_id(data: Mapping[str, Any], id_field: str | None, number: int, where: str) -> str:
    if id_field is None:
        return str(number)
    if id_field not in data:
        raise DatasetError(f"{where}: no field {id_field!r} (data.id_field); it has {', '.join(data)}")
    return str(data[id_field])
