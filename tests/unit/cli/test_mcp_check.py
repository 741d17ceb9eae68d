"""``rollmill check`` starts the MCP servers of a recipe and tells what is wrong with them before a run does."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

from services.cli.check.worlds import mcp_problems
from services.common.config.loading import validate
from services.common.config.recipe import Recipe
from services.common.installing import install

RAW = str(Path(__file__).parents[2] / "integration" / "envgateway" / "mcp" / "raw_server.py")


def recipe(names: list[str], **server: Any) -> Recipe:
    return validate(
        {
            "name": "r",
            "policies": {"a": {"model": {"path": "none"}}},
            "data": {"train": {"path": "rows.jsonl"}},
            "evaluation": {"at_start": False, "at_end": False},
            "workflow": {"name": "tool_use", "settings": {"tools": names, "reward": "math"}},
            "envgateway": {"mcp": {"raw": {"command": [sys.executable, "-S", RAW], **server}}},
        },
        "r",
    )


@pytest.mark.needs("mcp")
@pytest.mark.parametrize(
    ("tools", "server", "told"),
    [
        (["mcp:raw"], {}, []),
        (["mcp:raw/echo"], {}, []),
        (["mcp:raw/ecco"], {}, ["no tool 'ecco'"]),
        (["mcp:raw"], {"tools": ["ecco"]}, ["envgateway.mcp.raw.tools names 'ecco'"]),
        (["mcp:raw"], {"command": [sys.executable, "-c", "raise SystemExit('no index')"]}, ["no index"]),
        (["mcp:raw"], {"command": [sys.executable, "-S", RAW, "--schema", '{"type": "object", "required": 1}']},
         ["the schema of the server's tool 2 is invalid"]),
        (["mcp:raw"], {"command": [], "url": "http://127.0.0.1:9/mcp"}, ["http://127.0.0.1:9/mcp"]),
    ],
)  # fmt: skip
def test_a_server_is_tried(tools: list[str], server: dict[str, Any], told: list[str]) -> None:
    problems = mcp_problems(recipe(tools, **server))
    assert len(problems) == len(told)
    assert all(part in problem for part, problem in zip(told, problems, strict=True))


def test_a_missing_package_is_told_with_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "mcp" else found(name))
    (problem,) = mcp_problems(recipe(["mcp:raw"]))
    assert install("mcp") in problem
