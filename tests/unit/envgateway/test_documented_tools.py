"""The tools in docs/envgateway.md work: the test writes them to files, names them in a config and calls them."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from services.common.config.envgateway import EnvGatewayConfig
from services.common.text.tools import ToolCall, ToolStatus
from services.common.tools import load_tools
from services.envgateway.tools.registry import GatewayToolSession, ToolBox

PAGE = Path(__file__).parents[3] / "docs" / "envgateway.md"


def _blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE.read_text(), flags=re.DOTALL | re.MULTILINE)


@pytest.fixture
def box(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ToolBox]:
    (tools,) = _blocks("python")
    (tmp_path / "inventory.py").write_text(tools)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    config = EnvGatewayConfig(**yaml.safe_load(_blocks("yaml")[0])["envgateway"])
    yield ToolBox(load_tools(config.tools.paths))
    sys.modules.pop("inventory", None)


async def test_the_documented_tools_are_called(box: ToolBox) -> None:
    session = GatewayToolSession(box, ["stock", "basket"])
    assert (await session.answer(ToolCall(name="stock", arguments={"part": "bolt"}))).text == "40"
    none = await session.answer(ToolCall(name="stock", arguments={"part": "gear"}))
    assert (none.status, none.text) == (ToolStatus.TOOL_ERROR, "Error: there is no gear in this store")
    wrong = await session.answer(ToolCall(name="stock", arguments={"part": "axle"}))
    assert wrong.text == "Error: argument 'part': 'axle' is not one of ['bolt', 'nut', 'gear']"
    assert (await session.answer(ToolCall(name="basket", arguments={"part": "nut", "number": 2}))).text == "2 nut"
    assert (
        await session.answer(ToolCall(name="basket", arguments={"part": "bolt", "number": 1}))
    ).text == "2 nut, 1 bolt"
    other = GatewayToolSession(box, ["basket"])
    assert (await other.answer(ToolCall(name="basket", arguments={"part": "nut", "number": 5}))).text == "5 nut"
    for one in (session, other):
        await one.close()
    assert session.statistics.metrics()["tool_calls"] == 5 and session.statistics.metrics()["tool_errors"] == 2


def test_every_setting_in_the_table_of_limits_exists() -> None:
    page = PAGE.read_text()
    table = page[page.index("## Limits") : page.index("## Deployment")]
    config = EnvGatewayConfig()
    named = [cells[2] for cells in (line.split("|") for line in table.splitlines()) if len(cells) == 6]
    settings = [setting for cell in named[2:] if "'s `" not in cell for setting in _settings(cell)]
    assert len(settings) > 15
    for setting in settings:
        section: object = config
        for part in setting.split("."):
            section = getattr(section, part)


def _settings(cell: str) -> list[str]:
    """The names in a cell; later ones share the section of the first."""
    names = re.findall(r"`([^`]+)`", cell) or [""]
    section = names[0].rpartition(".")[0]
    return [name if "." in name or not section else f"{section}.{name}" for name in names if name]
