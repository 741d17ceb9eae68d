"""Logs are JSON lines with the bound ids in files, readable on the terminal, and without secrets."""

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
from typer.testing import CliRunner

from services.cli.__main__ import app
from services.common.security.keys import Role
from services.common.telemetry import logs
from services.common.telemetry.logs import HIDDEN, Repeats, redacted
from tests.keys import as_role, make_keys

# --- logs


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


# --- secrets


TOKEN = "eyJhbGciOiJFUzI1NiJ9.eyJydW4iOiJyMSJ9.c2lnbmF0dXJlLW9mLXRoZS10b2tlbg"
PEM = "-----BEGIN PRIVATE KEY-----\nMIGHAgEAMBMGByqGSM49\nAgEGCCqGSM49\n-----END PRIVATE KEY-----\n"


@pytest.mark.parametrize(
    ("text", "secret"),
    [
        (f"authorization: Bearer {TOKEN}", TOKEN),
        ("Authorization: Basic dXNlcjpwYXNzd29yZA==", "dXNlcjpwYXNzd29yZA"),
        ("{'authorization': 'c2VjcmV0LWtleQ'}", "c2VjcmV0LWtleQ"),
        ("(('authorization', 'bearer opaque-value'),)", "opaque-value"),
        (f"key {TOKEN}~s3ss10n-of-the-agent.", "s3ss10n"),
        (PEM, "MIGHAgEAMBMG"),
        (PEM[:60], "MIGHAgEAMBMG"),
        ("rediss://user:pass-word@queue:6379/0", "pass-word"),
    ],
)
def test_secrets_are_told_by_their_form(text: str, secret: str) -> None:
    assert secret not in redacted(text)
    assert HIDDEN in redacted(text)


def test_what_is_no_secret_stays() -> None:
    for text in ("tokens_per_s 12", "wrote to a@b", "tcp://127.0.0.1:5", "-----BEGIN CERTIFICATE-----", "author: me"):
        assert redacted(text) == text


def test_neither_log_file_nor_terminal_has_the_secrets_of_a_real_bundle(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle = as_role(make_keys(tmp_path / "keys"), Role.OPERATOR).bundle
    logs.configure("orchestrator", tmp_path)
    log = structlog.get_logger()
    log.warning(
        "a.header", headers={"authorization": f"Bearer {bundle.token}"}, pairs=[("authorization", bundle.token)]
    )
    log.warning("a.key", text=bundle.key.decode(), nested={"deep": [bundle.key.decode()]}, raw=bundle.key)
    log.warning("a.bundle", bundle=bundle, error=f"refused {bundle.token}")
    try:
        raise ValueError(f"cannot use {bundle.token}")
    except ValueError:
        log.exception("a.trace")
    written = (tmp_path / "logs" / "orchestrator.jsonl").read_text() + capsys.readouterr().err
    assert written.count("a.header") >= 1
    body = bundle.key.decode().splitlines()[1]
    for secret in (bundle.token, bundle.token.split(".")[1], bundle.token.split(".")[2], body):
        assert secret not in written


def test_a_recipe_that_is_printed_shows_no_password() -> None:
    setting = "envgateway.queue.redis_uri=rediss://user:pass-word@host:6379/0"
    result = CliRunner().invoke(app, ["check", "recipes/quickstart", "--show", "--set", setting])
    assert result.exit_code == 0, result.output
    assert f"rediss://{HIDDEN}@host:6379/0" in result.output and "pass-word" not in result.output


# --- repeats


def test_of_one_kind_one_is_told_in_a_second_with_how_many_were_not() -> None:
    now = 0.0
    repeats = Repeats(clock=lambda: now)
    assert [repeats.tell("GetRun", "expired") for _ in range(4)] == [{}, None, None, None]
    assert repeats.tell("GetRun", "malformed") == {}
    now = 1.5
    assert repeats.tell("GetRun", "expired") == {"and_before": 3}
    now = 3.0
    assert repeats.tell("GetRun", "expired") == {}
