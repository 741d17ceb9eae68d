"""A classic controller of AgentBench with the behaviour of the real one: a policy's text is an order.

``win``, ``lose``, ``limit`` end a session; ``raise`` makes the task raise; ``error`` makes it fail without raising;
``busy N`` is refused N times as busy; ``slow`` takes longer than every timeout; ``drop`` breaks the connection.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

CAPACITY = 2
ENDS = {
    "win": ("completed", {"result": True, "log": []}),
    "lose": ("agent invalid action", {"result": 0}),
    "limit": ("task limit reached", {"log": []}),
    "error": ("task error", {"result": False}),
    "unknown": ("unknown", {"result": False, "error": "planner"}),
    "nothing": ("completed", {"log": []}),
    "third": ("completed", {"reward": 0.33}),
}


@dataclass
class FakeController:
    """The sessions that hold a place, and the requests."""

    taken: dict[Any, list[dict[str, str]]] = field(default_factory=dict)  # history by session
    leaked: set[Any] = field(default_factory=set)
    cancelled: list[Any] = field(default_factory=list)
    said: list[str] = field(default_factory=list)  # turns that were taken
    refusals: int = 0
    syncs: int = 0
    failing_syncs: int = 0
    tasks: tuple[str, ...] = ("toy",)
    numbers: Any = field(default_factory=itertools.count)

    def begin(self, session: Any) -> list[dict[str, str]]:
        history = [{"role": "user", "content": "rules"}, {"role": "agent", "content": "OK."}]
        self.taken[session] = [*history, {"role": "user", "content": "first turn"}]
        return self.taken[session]

    async def is_busy(self, content: str, request: web.Request) -> bool:
        """Orders about the server, independent of the task."""
        match content.split():
            case ["busy", times] if self.refusals < int(times):
                self.refusals += 1
                return True
            case ["slow"]:
                await asyncio.sleep(30)
            case ["drop"]:
                assert request.transport is not None
                request.transport.close()
        self.said.append(content)
        return False

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/api/list_workers", self.list_workers),
            web.get("/api/list_sessions", self.list_sessions),
            web.post("/api/start_sample", self.start_sample),
            web.post("/api/interact", self.interact),
            web.post("/api/cancel", self.cancel),
            web.post("/api/sync_all", self.sync_all),
        ]

    async def list_workers(self, request: web.Request) -> web.Response:
        return web.json_response({name: {"indices": [0, 1, "x"], "workers": {}} for name in self.tasks})

    async def list_sessions(self, request: web.Request) -> web.Response:
        return web.json_response({str(session): {} for session in (*self.taken, *self.leaked)})

    async def start_sample(self, request: web.Request) -> web.Response:
        body = await request.json()
        if body["name"] not in self.tasks:
            return error(406, "Error: Task does not exist")
        if body["index"] == "worker gone":
            return error(400, "Error: Worker not responding\nCannot connect")
        if body["index"] not in (0, 1, "x"):
            return error(400, "Error: Index out of bounds")
        if len(self.taken) + len(self.leaked) >= CAPACITY:
            return error(406, "Error: No workers available")
        session = next(self.numbers)
        output = {"index": None, "status": "running", "result": None, "history": self.begin(session)}
        return web.json_response({"session_id": session, "output": output})

    async def interact(self, request: web.Request) -> web.Response:
        body = await request.json()
        session, content = body["session_id"], body["agent_response"]["content"]
        if session not in self.taken:
            return error(400, "Error: Session does not exist")
        if await self.is_busy(content, request):
            return web.Response(status=500, text="Internal Server Error")
        if content == "raise":
            del self.taken[session]
            self.leaked.add(session)
            return error(501, "Error: Worker returned error\n{...}")
        history = self.taken[session]
        history.append({"role": "agent", "content": content})
        if content in ENDS:
            del self.taken[session]
            status, result = ENDS[content]
            output = {"index": 0, "status": status, "result": result, "history": history}
            return web.json_response({"session_id": session, "output": output})
        history.append({"role": "user", "content": f"you said {content}"})
        output = {"index": None, "status": "running", "result": None, "history": history[:1] + history[-3:]}
        return web.json_response({"session_id": session, "output": output})

    async def cancel(self, request: web.Request) -> web.Response:
        session = (await request.json())["session_id"]
        self.cancelled.append(session)
        if session in self.leaked:
            return error(400, "Error: Worker returned error\nNo such session")
        if self.taken.pop(session, None) is None:
            return error(400, "Error: Session does not exist")
        return web.json_response({"session_id": session})

    async def sync_all(self, request: web.Request) -> web.Response:
        self.syncs += 1
        if self.syncs > self.failing_syncs:
            self.leaked.clear()
        return web.json_response(None)


def error(status: int, detail: str) -> web.Response:
    return web.json_response({"detail": detail}, status=status)


@asynccontextmanager
async def running(fake: FakeController) -> AsyncIterator[str]:
    """Its URL."""
    application = web.Application()
    application.add_routes(fake.routes())
    runner = web.AppRunner(application, shutdown_timeout=0.1, handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/api"
    finally:
        await runner.cleanup()
