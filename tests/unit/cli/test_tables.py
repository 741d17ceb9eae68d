"""Tables on narrow terminals: whole columns are left out by importance, and named; the others stay readable."""

from __future__ import annotations

import io

from rich.console import Console

from services.cli.console import Column, FittingTable


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
