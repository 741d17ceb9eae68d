"""What commands print: tables on narrow terminals, pictures, plain text, helps, and the sources of a mixture."""

from __future__ import annotations

import io
import sys

import pytest
from rich.console import Console

from services.cli import console as drawing
from services.cli.console import Column, FittingTable, say, source_words, tell
from services.cli.inspect.plot import part_lines
from services.cli.watch import render
from services.common.errors import ConfigError
from services.common.pb import run_pb2
from services.common.telemetry.metrics import StepKey, source_key


def drawn(table: FittingTable, width: int) -> str:
    output = io.StringIO()
    Console(file=output, width=width).print(table)
    return output.getvalue()


def groups() -> FittingTable:
    table = FittingTable(
        [Column("group"), Column("task", spare=1), Column("took", "right"), Column("retries", spare=2)]
    )
    table.add_row("c8f8e1-00004413", "98-plus-80", "1.04 s", "0")
    return table


def test_what_matters_least_goes_first_and_is_named() -> None:
    text = drawn(groups(), 44)
    assert "c8f8e1-00004413" in text
    assert "98-plus-80" in text
    assert "no room here for: retries" in text
    narrower = drawn(groups(), 32)
    assert "c8f8e1-00004413" in narrower
    assert "1.04 s" in narrower
    assert "98-plus-80" not in narrower
    assert "no room here for: task, retries" in narrower.replace("\n", " ")


def test_the_width_that_shows_everything_is_told() -> None:
    width = int(drawn(groups(), 44).partition("COLUMNS=")[2].split()[0])
    assert "retries" not in drawn(groups(), width - 1).partition("no room")[0]
    assert "no room" not in drawn(groups(), width)
    terminal = io.StringIO()
    Console(file=terminal, width=44, force_terminal=True, color_system=None).print(groups())
    assert f"they need a width of {width}" in " ".join(terminal.getvalue().split())


def test_what_must_be_shown_is_folded_and_loses_no_character() -> None:
    lines = drawn(groups(), 20).splitlines()
    cells = [line.split("│")[1].strip() for line in lines if line.startswith("│")]
    assert "".join(cells) == "c8f8e1-00004413"


# --- pictures


def test_nothing_ends_for_want_of_a_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    console = Console(file=io.StringIO(), width=200)
    assert drawing.drawn(drawing.pyplot, console) is None
    assert "no picture: a picture needs the package matplotlib" in console.file.getvalue()  # type: ignore[attr-defined]


# --- plain text


@pytest.mark.parametrize(
    "text", ["runs/[bold]x[/bold]: [1, 2]", "[/]", "[link=file:///etc]a[/link]", "a " * 200 + "b", ""]
)
def test_a_text_is_printed_as_it_is_in_one_line(text: str) -> None:
    console = Console(record=True, width=40, force_terminal=True)
    say(console, text, "bold red")
    assert console.export_text() == f"{text}\n"


def test_the_text_of_an_error_controls_no_terminal() -> None:
    written = io.StringIO()
    console = Console(file=written, width=200)
    tell(ConfigError("recipe.yaml cannot run:\n  ru\x1b[2Jn\u202ex: no such setting"), console)
    assert written.getvalue() == "error: recipe.yaml cannot run:\n  ru\\x1b[2Jn\\x202ex: no such setting\n"


# --- help


# --- sources of a mixture

ROW = {
    source_key(source, key): value
    for source, share in {"maths": 0.34, "code": 0.66}.items()
    for key, value in {
        StepKey.SHARE: share, StepKey.WANTED_SHARE: 1 / 3 if source == "maths" else 2 / 3, StepKey.STALENESS_MAX: 2.0
    }.items()
} | {source_key("code", StepKey.ROLLOUT_REWARD_MEAN): 0.125}  # fmt: skip


def shown(policies: list[run_pb2.PolicyProgress]) -> str:
    console = Console(record=True, width=140)
    console.print(render(run_pb2.RunProgress(policies=policies), "run"))
    return console.export_text()


def test_watch_shows_a_line_for_each_source_with_share_reward_and_staleness() -> None:
    text = shown([run_pb2.PolicyProgress(policy="model0", version=3, num_steps=9, metrics=ROW)])
    (code,) = [line.split() for line in text.splitlines() if " code " in line]
    (maths,) = [line.split() for line in text.splitlines() if " maths " in line]
    assert code[1:7] == ["code", "66.0%", "66.7%", "0.125", "≤", "2"]
    assert maths[1:5] == ["maths", "34.0%", "33.3%", "-"], "no rollout finished since the batch before"


def test_the_line_of_a_run_has_the_reward_of_the_batch_where_no_rollout_ended_since_the_batch_before() -> None:
    row = ROW | {source_key("maths", StepKey.BATCH_REWARD_MEAN): 0.25}
    assert "(wanted 33.3%), batch reward 0.250" in source_words(row)
    assert "(wanted 66.7%), reward 0.125" in source_words(row)


def test_sources_of_several_policies_are_told_apart() -> None:
    policies = [run_pb2.PolicyProgress(policy=name, metrics=ROW) for name in ("a", "b")]
    text = shown(policies)
    assert "a/code" in text and "b/maths" in text


def test_a_run_with_one_dataset_has_no_table_of_sources() -> None:
    assert "wanted" not in shown([run_pb2.PolicyProgress(policy="model0", metrics={"rollout_reward_mean": 0.5})])
    assert source_words({"rollout_reward_mean": 0.5}) == ""


def test_the_picture_draws_the_reward_of_each_source() -> None:
    assert [line.label for line in part_lines([[{"step": 1, **ROW}]])] == ["source maths", "source code"]
