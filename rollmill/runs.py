"""Starts runs, and reads their metrics, trajectories and traces, as rows or as Arrow tables."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from services.common.config.loading import load_resolved
from services.common.errors import ConfigError
from services.common.installing import install

if TYPE_CHECKING:
    from services.common.config.recipe import Recipe

Row = dict[str, Any]


def run(recipe: str | Path, *, profile: str | None = None, quiet: bool = False, **overrides: Any) -> Run:
    """Run a recipe to its end on this node, as ``rollmill run`` does, and return its metrics, trajectories and traces.

    ``overrides`` are settings: ``run={"steps": 3}``, or ``**{"run.steps": 3}``. ``quiet`` suppresses output. Call it in
    the main thread, below ``if __name__ == "__main__":``.

    Raises:
        ConfigError: the recipe cannot run, with a line for each problem.
        InfrastructureError, DeadlineError: a process failed, with its last lines.
    """
    if threading.current_thread() is not threading.main_thread():
        raise ConfigError("rollmill.run waits for Ctrl-C and SIGTERM: call it in the main thread")
    from rich.console import Console

    from services.cli.run.directory import opened
    from services.cli.run.launch import run as run_recipe

    console = Console(stderr=True, quiet=quiet)
    resolved, run_dir = opened(Path(recipe), None, settings_of(overrides), profile, console)
    run_recipe(resolved, run_dir, console)
    return Run(run_dir)


def settings_of(overrides: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Keyword arguments as the command line's ``a.b=c``.

    >>> settings_of({"run": {"steps": 3, "id": "a"}, "sampling.temperature": 0.5})
    ['run.steps=3', 'run.id=a', 'sampling.temperature=0.5']
    """
    settings = []
    for key, value in overrides.items():
        if isinstance(value, Mapping) and value:
            settings += settings_of(value, f"{prefix}{key}.")
        else:
            plain = str(value) if isinstance(value, Path) else value
            text = yaml.safe_dump(plain, default_flow_style=True, width=math.inf).removesuffix("...\n").strip()
            settings.append(f"{prefix}{key}={text}")
    return settings


@dataclass(frozen=True, slots=True, repr=False)
class Rows:
    """Rows that are read anew at each iteration, in the order in which they were written."""

    read: Callable[[], Iterator[Row]]

    def __iter__(self) -> Iterator[Row]:
        return self.read()

    def __repr__(self) -> str:
        return "<Rows: iterate over them, or .arrow() makes a table>"

    def arrow(self) -> Any:
        """The rows as a ``pyarrow.Table``, with a column for every key of any row; ``.to_pandas()`` and
        ``polars.from_arrow`` make data frames. A value that fits no column of its key makes the whole column JSON text.

        Raises ``ConfigError`` where pyarrow is not installed.
        """
        try:
            import pyarrow
        except ImportError:
            raise ConfigError(f"tables need pyarrow: {install('orchestrator')}") from None
        rows = list(self)
        columns: dict[str, Any] = {}
        for name in dict.fromkeys(name for row in rows for name in row):
            values = [row.get(name) for row in rows]
            try:
                columns[name] = pyarrow.array(values)
            except (pyarrow.ArrowInvalid, pyarrow.ArrowTypeError, pyarrow.ArrowNotImplementedError):
                columns[name] = pyarrow.array([None if value is None else json.dumps(value) for value in values])
        return pyarrow.table(columns)


class Run:
    """A run by its directory: one that has ended, or one that still goes on."""

    def __init__(self, path: str | Path) -> None:
        """Raises ``ConfigError`` when the directory is no run directory."""
        self.path = Path(path)
        self.recipe: Recipe = load_resolved(self.path)

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r})"

    @property
    def summary(self) -> Row:
        """Figures of the whole run: evaluations, steps, seconds. Raises ``ConfigError`` for a run that has not ended."""
        file = self.path / "summary.json"
        if not file.is_file():
            raise ConfigError(f"{self.path} has no summary yet: the run has not ended")
        summary: Row = json.loads(file.read_text())
        return summary

    def metrics(self, policy: str | None = None) -> Rows:
        """Rows of the metrics: of the run, of its evaluations and of every training step (``kind`` says of which);
        those of one policy, if named."""
        from services.cli.inspect.run_state import read_metrics

        def read() -> Iterator[Row]:
            return (row for row in read_metrics(self.path) if policy is None or row.get("policy") == policy)

        return Rows(read)

    def trajectories(self) -> Rows:
        """Every trajectory that the journal still has: task group, reward, sequences with token ids and log-probabilities."""
        from services.cli.inspect.run_model import open_journal
        from services.orchestrator.journal import entries
        from services.orchestrator.journal.entries import plain_trajectory

        def read() -> Iterator[Row]:
            with closing(open_journal(self.path)) as reader:
                for found in list(reader.rows_of(entries.TRAJECTORY)):
                    if (record := reader.load(found)) is not None:
                        yield plain_trajectory(record)

        return Rows(read)

    def traces(self) -> Rows:
        """Every task group: the times of issue, rollout, judgement, batch and training, with its stages in seconds."""
        from services.cli.inspect.trace import group_as_json, read_groups

        return Rows(lambda: map(group_as_json, read_groups(self.path)))
