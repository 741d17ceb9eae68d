"""Logs are JSON lines with the bound ids in files, readable on the terminal, and quiet where the launcher draws."""

from __future__ import annotations

import asyncio
import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import structlog

from services.common.telemetry import logs


@pytest.fixture(autouse=True)
def library_logging() -> Iterator[None]:
    """``configure`` replaces the handlers of the root logger, pytest's among them."""
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    yield
    root.handlers[:] = before
    root.setLevel(level)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_events_are_json_lines_with_bound_ids(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("trainer", tmp_path, instance="trainer-model0")
    logs.bind(run="r1", policy="model0")
    structlog.get_logger().info("batch.ready", step=7)
    (line,) = lines(tmp_path / "logs" / "trainer-model0.jsonl")
    assert line.pop("timestamp").endswith("Z")
    assert line == {
        "service": "trainer",
        "instance": "trainer-model0",
        "event": "batch.ready",
        "level": "info",
        "run": "r1",
        "policy": "model0",
        "step": 7,
    }
    shown = capsys.readouterr().err
    assert "batch.ready" in shown
    assert "step" in shown


async def test_ids_reach_the_tasks_that_are_started_later_and_no_others(tmp_path: Path) -> None:
    logs.configure("inference", tmp_path)
    log = structlog.get_logger()

    async def rollout(group: str) -> None:
        logs.bind(task_group=group)
        await asyncio.sleep(0)
        log.info("rollout.ended")

    logs.bind(run="r1")
    await asyncio.gather(rollout("g1"), rollout("g2"))
    log.info("all.ended")
    seen = [(line["run"], line.get("task_group")) for line in lines(tmp_path / "logs" / "inference.jsonl")]
    assert seen == [("r1", "g1"), ("r1", "g2"), ("r1", None)]


def test_the_launchers_terminal_shows_warnings_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("launcher", tmp_path)
    structlog.get_logger().info("process.started")
    structlog.get_logger().warning("process.died")
    shown = capsys.readouterr().err
    assert "process.died" in shown
    assert "process.started" not in shown
    events = [line["event"] for line in lines(tmp_path / "logs" / "launcher.jsonl")]
    assert events == ["process.started", "process.died"]


def test_any_value_can_be_logged(tmp_path: Path) -> None:
    logs.configure("trainer", tmp_path)
    structlog.get_logger().info("odd", path=Path("a/b"), array=np.arange(2), by_step={1: "x"}, error=ValueError("v"))
    (line,) = lines(tmp_path / "logs" / "trainer.jsonl")
    assert (line["path"], line["array"], line["by_step"], line["error"]) == ("a/b", [0, 1], {"1": "x"}, "v")


def test_what_libraries_log_is_an_event(tmp_path: Path) -> None:
    logs.configure("trainer", tmp_path)
    logs.bind(run="r1")
    logging.getLogger("grpc").error("%d calls lost", 3)
    logging.getLogger("grpc").info("not of interest")
    (line,) = lines(tmp_path / "logs" / "trainer.jsonl")
    assert (line["event"], line["logger"], line["message"]) == ("library.log", "grpc", "3 calls lost")
    assert (line["level"], line["run"]) == ("error", "r1")


def test_a_full_disk_under_standard_error_stops_nobody(tmp_path: Path) -> None:
    code = (
        "import pathlib, structlog; from services.common.telemetry import logs\n"
        "logs.configure('gateway', pathlib.Path('.'))\n"
        "for _ in range(3): structlog.get_logger().error('disk.full', detail='x' * 9000)\n"
        "pathlib.Path('alive').touch()"
    )
    with Path("/dev/full").open("wb") as full:
        subprocess.run(
            [sys.executable, "-c", code], stderr=full, cwd=tmp_path, env={"PYTHONPATH": str(Path.cwd())}, check=False
        )
    assert (tmp_path / "alive").exists()
