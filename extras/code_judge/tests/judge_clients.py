"""Clients of Code Judge as training systems have them, each over an HTTP stack and with habits of its own."""

from __future__ import annotations

import asyncio
import base64
import json
import urllib.request
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Any

import aiohttp

from tests.waiting import WAIT_S

# What rollouts wrap a cell in: run it as ``__main__``, show the value of a trailing expression, end by force on an error.
_CELL = """
import ast, base64, os, sys, traceback
from io import StringIO
from contextlib import redirect_stdout

scope = {{"__name__": "__main__", "__builtins__": __builtins__}}

def run(cell, quiet):
    tree = ast.parse(cell)
    last = ast.Expression(tree.body.pop().value) if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    try:
        with redirect_stdout(StringIO() if quiet else sys.stdout):
            exec(compile(tree, "<string>", "exec"), scope)
            value = eval(compile(last, "<string>", "eval"), scope) if last else None
            if value is not None:
                print(repr(value))
    except Exception:
        if not quiet:
            traceback.print_exc(file=sys.stderr)
            os._exit(1)

for cell, quiet in {cells!r}:
    run(base64.b64decode(cell).decode(), quiet)
"""


class RolloutClient:
    """Sends tool calls as long batches without ids, a connection for each, and repeats requests without a slot.

    As rStar2's and RLinf's tools do: missing fields are left out, stdin is ``null`` where there is none.
    """

    def __init__(self, port: int, timeout_s: float = 60.0) -> None:
        self._url = f"http://127.0.0.1:{port}/run/long-batch"
        self._timeout_s = timeout_s
        self.broken = 0

    async def __aenter__(self) -> RolloutClient:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=16, force_close=True),
            timeout=aiohttp.ClientTimeout(total=self._timeout_s),
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._session.close()

    async def call(self, *cells: str, stdin: str | None = None) -> str:
        """The last cell's words, after the others were run in silence, as the model sees them."""
        quoted = [
            (base64.b64encode(cell.encode()).decode(), index + 1 < len(cells)) for index, cell in enumerate(cells)
        ]
        [result] = await self.send([{"type": "python", "solution": _CELL.format(cells=quoted), "input": stdin}])
        right = result["run_success"] and result["success"]
        words = ["Tool call success" if right else f"Tool call failure\nreason: {result['reason']}"]
        words += [f"{name}: {result[name]}" for name in ("stdout", "stderr") if result[name]]
        return "\n".join([*words, f"execution time: {result['cost']:.2f}s"])

    async def send(self, submissions: list[dict[str, Any]], attempts: int = 20) -> list[dict[str, Any]]:
        results: dict[int, dict[str, Any]] = {}
        for _ in range(attempts):
            left = [index for index in range(len(submissions)) if index not in results]
            if not left:
                return [results[index] for index in range(len(submissions))]
            body = {"type": "batch", "submissions": [submissions[index] for index in left]}
            try:
                async with self._session.post(self._url, json=body) as response:
                    response.raise_for_status()
                    answer = await response.json()
            except (aiohttp.ClientError, TimeoutError):
                self.broken += 1
                await asyncio.sleep(0.2)
                continue
            for index, result in zip(left, answer["results"], strict=True):
                if result["reason"] not in ("queue_timeout", "internal_error"):
                    assert index not in results
                    results[index] = result
        raise AssertionError(f"{len(submissions) - len(results)} submissions were not answered")


@dataclass
class Submission:
    """A request as the judge's own client sends one: every field, ``null`` for absent values."""

    sub_id: str | None
    type: str
    solution: str
    input: str | None = None
    expected_output: str | None = None


@dataclass
class Result:
    """A field more or less than these and the client breaks."""

    sub_id: str
    success: bool
    run_success: bool
    cost: float
    stdout: str | None = None
    stderr: str | None = None
    reason: str = ""


@dataclass
class Status:
    queue: int
    num_workers: int


class GradingClient:
    """The judge's own client: blocking, one connection a request."""

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}"

    def status(self) -> Status:
        return Status(**self._get("/status"))

    def ping(self) -> Any:
        return self._get("/ping")

    def judge(self, submissions: list[Submission], path: str = "/judge/long-batch") -> list[Result]:
        body = {"type": "batch", "submissions": [asdict(submission) for submission in submissions]}
        request = urllib.request.Request(
            self._url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as response:
            answer = json.loads(response.read().decode())
        assert set(answer) == {"sub_id", "results"} and isinstance(answer["sub_id"], str)
        return [Result(**result) for result in answer["results"]]

    def _get(self, path: str) -> Any:
        with urllib.request.urlopen(self._url + path, timeout=WAIT_S) as response:
            assert response.status == 200 and response.headers.get_content_type() == "application/json"
            return json.loads(response.read())
