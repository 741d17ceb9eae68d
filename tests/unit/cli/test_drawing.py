"""Without matplotlib a command names the missing package, and a run ends as with a picture."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest
from rich.console import Console

from services.cli import console as drawing
from services.common.errors import ConfigError


@pytest.fixture
def without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)


@pytest.mark.usefixtures("without_matplotlib")
def test_a_missing_matplotlib_is_told_with_what_to_do() -> None:
    with pytest.raises(ConfigError, match=r"needs the package matplotlib.*pip install"):
        drawing.pyplot()


@pytest.mark.usefixtures("without_matplotlib")
def test_nothing_ends_for_want_of_a_picture() -> None:
    console = Console(file=io.StringIO(), width=200)
    assert drawing.drawn(drawing.pyplot, console) is None
    assert "no picture: a picture needs the package matplotlib" in console.file.getvalue()  # type: ignore[attr-defined]


def test_a_picture_that_can_be_drawn_is(tmp_path: Path) -> None:
    target = tmp_path / "one.png"
    assert drawing.drawn(lambda: drawing.pyplot().imsave(target, [[0.0, 1.0]]), Console()) is None
    assert target.read_bytes().startswith(b"\x89PNG")
