"""``rollmill.run`` and ``rollmill.Run`` without a run: overrides, tables, and refusals. A real run: tests/e2e."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

import rollmill
from rollmill.runs import Rows, settings_of
from services.common.config.loading import save_resolved, validate
from tests.integration.inference.peers import scripted_recipe
from tests.unit.orchestrator.metrics_rows import write_run

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(st.characters(codec="ascii"), max_size=20),
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=4,
)  # fmt: skip


@given(st.dictionaries(st.sampled_from(["a", "b", "c.d"]), VALUES | st.dictionaries(st.sampled_from("ef"), VALUES)))
def test_overrides_are_settings_of_the_command_line_with_the_same_values(overrides: dict[str, Any]) -> None:
    expected = {}
    for key, value in overrides.items():
        if isinstance(value, dict) and value:
            expected |= {f"{key}.{inner}": one for inner, one in value.items()}
        else:
            expected[key] = value
    found = dict(setting.partition("=")[::2] for setting in settings_of(overrides))
    assert {key: yaml.safe_load(text) for key, text in found.items()} == expected


def test_rows_of_different_keys_and_types_become_one_table() -> None:
    rows = [{"a": 1, "b": "x"}, {"a": 2.5, "c": {"d": [1]}}, {"a": None, "b": 3}]
    table = Rows(lambda: iter(rows)).arrow()
    assert table.column_names == ["a", "b", "c"]
    assert table.column("a").to_pylist() == [1.0, 2.5, None]
    assert table.column("b").to_pylist() == ['"x"', None, "3"]  # of two types: JSON
    assert table.column("c").to_pylist() == [None, {"d": [1]}, None]
    assert Rows(lambda: iter([])).arrow().num_rows == 0


def test_what_is_no_run_or_has_no_journal_yet_is_told(tmp_path: Path) -> None:
    with pytest.raises(rollmill.ConfigError, match="is no run directory"):
        rollmill.Run(tmp_path)
    save_resolved(validate(scripted_recipe(), source="test"), tmp_path)
    run = rollmill.Run(tmp_path)
    assert repr(run) == f"Run('{tmp_path}')"
    with pytest.raises(rollmill.ConfigError, match="has not ended"):
        run.summary  # noqa: B018
    for rows in (run.metrics(), run.trajectories(), run.traces()):
        with pytest.raises(rollmill.ConfigError, match=str(tmp_path)):
            list(rows)


def test_a_run_is_refused_outside_the_main_thread() -> None:
    told: list[str] = []

    def start() -> None:
        try:
            rollmill.run("recipes/quickstart")
        except rollmill.ConfigError as error:
            told.append(error.message)

    thread = threading.Thread(target=start)
    thread.start()
    thread.join(20)
    assert told == ["rollmill.run waits for Ctrl-C and SIGTERM: call it in the main thread"]


def test_a_recipe_that_cannot_run_is_refused_with_its_keys() -> None:
    with pytest.raises(rollmill.ConfigError, match=r"run\.stepz"):
        rollmill.run(Path(__file__).parents[3] / "recipes" / "quickstart", run={"stepz": 3})


def test_the_time_of_every_row_of_a_finished_run_is_a_number(tmp_path: Path) -> None:
    save_resolved(validate(scripted_recipe(), source="test"), tmp_path)
    write_run(tmp_path)
    run = rollmill.Run(tmp_path)
    rows = list(run.metrics())
    assert rows[-1]["kind"] == "summary" and rows[-1]["shares"] == {"replica/a": {"generating": 1.0}}
    assert run.metrics().arrow().column("time").to_pylist() == [row["time"] for row in rows]
    assert all(isinstance(row["time"], float) for row in rows)
