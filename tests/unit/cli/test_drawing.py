"""Without matplotlib a command names the missing package, and a run ends as with a picture."""

from __future__ import annotations

import io
import sys

import pytest
from rich.console import Console

from services.cli import console as drawing


@pytest.fixture
def without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)


@pytest.mark.usefixtures("without_matplotlib")
def test_nothing_ends_for_want_of_a_picture() -> None:
    console = Console(file=io.StringIO(), width=200)
    assert drawing.drawn(drawing.pyplot, console) is None
    assert "no picture: a picture needs the package matplotlib" in console.file.getvalue()  # type: ignore[attr-defined]
