"""A page of another site in a real browser runs no program and reads no answer here; a server without the checks obeys
the page."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from extras.code_judge.server import HttpServer, Submission, SubmissionOutcome
from extras.code_judge.settings import HttpConfig
from extras.prometheus.server import MetricsServer
from extras.worlds.settings import ServedTaskConfig
from extras.worlds.tests.taskserver_scripted import task_server
from services.common import http
from tests import needs
from tests.contract.test_http_doors import _status
from tests.integration.hostile_page import Target, visit
from tests.integration.inference.endpoint_peers import serving

pytestmark = pytest.mark.slow

WAYS = ("text", "form type", "credentials", "no type", "form text plain", "beacon", "opaque")
"""Of sending a program that a server without checks obeys."""


class _Python:
    """Runs submissions as programs. Those here leave a file behind."""

    async def run(self, submission: Submission, *_: object) -> SubmissionOutcome:
        process = await asyncio.create_subprocess_exec(sys.executable, "-I", "-S", "-c", submission.solution)
        return SubmissionOutcome(run_success=await process.wait() == 0, success=True, stdout="a secret")


@asynccontextmanager
async def servers(folder: Path, kind: str = "") -> AsyncIterator[tuple[list[Target], Any]]:
    """Judge, task server, endpoint and metrics, whose names begin with ``kind``, and the task server."""
    submissions: Any = _Python()
    judge = HttpServer(HttpConfig(port=0), "127.0.0.1", _NoQueue(), submissions)  # type: ignore[arg-type]
    metrics = MetricsServer(_status, (), name="envgateway", host="127.0.0.1", port=0)
    await judge.start()
    metrics_port = await metrics.start()
    # The name of an attempt may have a slash, which no file has.
    program = f"import os; os.close(os.open({str(folder)!r} + '/' + 'ATTACK'.replace('/', ' '), os.O_CREAT))"
    async with (
        task_server({"orders": ServedTaskConfig(end=5)}) as tasks,
        serving() as endpoint,
    ):
        yield [
            Target(name=f"{kind}judge", port=judge.port, path="/run", reads=("/status",),
                   bodies={"type": "python", "solution": program}),
            Target(name=f"{kind}tasks", port=tasks.server.port, path="/api/episode/start", reads=("/api/health",),
                   bodies={"sample_id": 0}),
            Target(name=f"{kind}endpoint", port=int(endpoint.base_url.rpartition(":")[2].partition("/")[0]),
                   path="/v1/chat/completions", bodies={"messages": []}, reads=("/v1/models",)),
            Target(name=f"{kind}metrics", port=metrics_port, path="/metrics", bodies={}, reads=("/metrics",)),
        ], tasks.server  # fmt: skip
    await judge.stop()
    await metrics.stop()


class _NoQueue:
    num_waiting, num_slots = 7, 3


def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Requests that come through to a route's handler, of servers that are made from now on."""
    found: list[str] = []
    inner = http.body_in_time  # behind the checks

    def watched() -> Any:
        awaited = inner()

        @web.middleware
        async def middleware(request: web.Request, handler: http.Handler) -> web.StreamResponse:
            found.append(f"{request.method} {request.path}")
            return await awaited(request, handler)  # type: ignore[no-any-return]

        return middleware

    monkeypatch.setattr(http, "body_in_time", watched)
    return found


def without_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers that are made from now on have none."""

    def nothing(*_: object) -> Any:
        @web.middleware
        async def middleware(request: web.Request, handler: http.Handler) -> web.StreamResponse:
            return await handler(request)

        return middleware

    async def as_it_is(request: web.BaseRequest, answer: web.StreamResponse) -> None:
        """Adds no header."""

    monkeypatch.setattr(http, "for_programs", nothing)
    monkeypatch.setattr(http, "closed_to_pages", as_it_is)


async def test_a_page_of_another_site_runs_and_reads_nothing_but_of_servers_without_the_checks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs.check("chromium")
    with monkeypatch.context() as counting:
        reached = counted(counting)
        guarded = servers(tmp_path)
        targets, tasks = await guarded.__aenter__()
    try:
        without_checks(monkeypatch)
        async with servers(tmp_path, "open") as (opened, open_tasks):
            report = await visit([*targets, *opened])
            await asyncio.sleep(0.3)  # a beacon may come last
            begun = [each.num_live for each in (tasks, open_tasks)]
    finally:
        await guarded.__aexit__(None, None, None)
    ran, read = {path.name for path in tmp_path.iterdir()}, [json.dumps(each) for each in report.read]
    assert len(report.tried) > 200, "the page has tried everything"
    wanted = {f"openjudge {host} {way}" for host in ("127.0.0.1", "localhost") for way in WAYS}
    wanted |= {f"openjudge rebound {way}" for way in ("json", "text")}
    assert wanted <= ran, sorted(wanted - ran)
    for what in (
        "openjudge rebound json",
        "a secret",
        "openjudge rebound get /status",
        "openmetrics rebound get /metrics",
    ):
        assert what in " ".join(read)
    assert begun[0] == 0 and begun[1] > 0
    assert [each for each in (*ran, *read) if not each.strip('"').startswith("open")] == []
    assert reached == [], "not even what is only read"
