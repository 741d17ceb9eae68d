"""A stand-in for an SGLang server, for failures that the true one does not give on demand. Also run as a script.

After each token the stand-in emits the next number, so that an interrupted request that goes on elsewhere shows whether
its prefix was sent again. ``POST /misbehave`` sets the next fault; ``GET /seen`` lists the requests. The conformance suite
tests the true server.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from aiohttp import web

VOCABULARY = 1000
LOGPROB = -0.25
# To those without the key; the last two are the tests' own.
OPEN = ("/ready", "/health_generate", "/misbehave", "/seen")


class Fake:
    def __init__(self, version: str, token_s: float, key: str, die: Callable[[], object] = lambda: os._exit(3)) -> None:
        self.key = key
        self.die = die
        self.version = version  # of the scheduler: the version of the tokens
        self.token_s = token_s
        self.running = asyncio.Event()
        self.running.set()
        self.aborted: set[str] = set()
        self.faults: dict[str, list[dict[str, Any]]] = {}  # by route
        self.seen: list[tuple[str, Any]] = []

    def application(self) -> web.Application:
        made = web.Application(middlewares=[self.check_key])
        made.router.add_post("/misbehave", self.misbehave)
        made.router.add_get("/seen", self.tell)
        made.router.add_post("/generate", self.generate)
        for route in ("/ready", "/server_info", "/health_generate"):
            made.router.add_get(route, self.answer)
        for route in (
            "/abort_request",
            "/pause_generation",
            "/continue_generation",
            "/update_weights_from_disk",
        ):
            made.router.add_post(route, self.answer)
        return made

    @web.middleware
    async def check_key(self, request: web.Request, handler: Any) -> Any:
        if request.path not in OPEN and request.headers.get("Authorization") != f"Bearer {self.key}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        return await handler(request)

    async def misbehave(self, request: web.Request) -> web.Response:
        """``{"route": ..., "times": n, ...}``: the next n calls of a route go wrong."""
        fault = await request.json()
        self.faults.setdefault(fault["route"], []).extend([fault] * fault.get("times", 1))
        return web.json_response({})

    async def tell(self, request: web.Request) -> web.Response:
        return web.json_response(self.seen)

    async def answer(self, request: web.Request) -> web.Response:
        body = await request.json() if request.method == "POST" and request.can_read_body else {}
        route = request.path
        self.seen.append((route, body))
        fault = self.fault(route)
        if fault.get("hang_s"):
            await asyncio.sleep(fault["hang_s"])
        if route == "/update_weights_from_disk" and fault.get("applied", not fault):
            self.version = body["weight_version"]
        if fault.get("status"):
            return web.json_response({"success": False, "message": fault.get("message", "")}, status=fault["status"])
        if route == "/pause_generation":
            self.running.clear()
        elif route == "/continue_generation":
            self.running.set()
        elif route == "/abort_request":
            self.aborted.add(body["rid"])
        return web.json_response({"success": True})

    def fault(self, route: str) -> dict[str, Any]:
        waiting = self.faults.get(route)
        return waiting.pop(0) if waiting else {}

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.seen.append(("/generate", body))
        fault = self.fault("/generate")
        if fault.get("status"):
            return web.json_response({"error": {"message": fault.get("message", "")}}, status=fault["status"])
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        asked, parameters = body["input_ids"], body["sampling_params"]
        token = asked[-1]
        spans: list[dict[str, Any]] = []
        for number in range(parameters["max_new_tokens"]):
            await asyncio.sleep(self.token_s)
            await self.running.wait()
            if number == fault.get("die_at"):
                self.die()
                await asyncio.sleep(3600)
            if number == fault.get("stall_at"):
                await asyncio.sleep(3600)
            token = (token + 1) % VOCABULARY
            if not spans or spans[-1]["version"] != self.version:
                spans.append({"version": self.version, "start": number, "end": number})
            spans[-1]["end"] = number + 1
            finish: dict[str, Any] | None = None
            if not parameters.get("ignore_eos") and token in (*parameters.get("stop_token_ids", ()), fault.get("eos")):
                finish = {"type": "stop", "matched": token}
            elif body["rid"] in self.aborted or number == fault.get("aborted_at"):
                finish = {"type": "abort", "message": "out of memory", "status_code": fault.get("abort_status")}
            elif number + 1 == parameters["max_new_tokens"]:
                finish = {"type": "length"}
            meta: dict[str, Any] = {
                "finish_reason": finish,
                "weight_version": self.version,
                "output_token_logprobs": [[None if number == fault.get("nan_at") else LOGPROB, token, None]],
            }
            if body.get("return_sampling_mask"):
                meta["output_token_sampling_logprobs"] = [LOGPROB]
                meta["output_token_sampling_mask"] = [[(token + 5) % VOCABULARY, token]]
            if finish is not None and not fault.get("no_spans"):
                meta["weight_versions"] = spans
            row = json.dumps({"output_ids": [token], "meta_info": meta}).encode()
            if number == fault.get("nonsense_at"):
                row = b'{"output_ids": "what", "meta_info": {'
            await response.write(b"data: " + row + b"\n\n")
            if finish is not None:
                break
        await response.write(b"data: [DONE]\n\n")
        return response


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int)
    parser.add_argument("--config", type=Path)
    parser.add_argument("--weight-version", default="default")
    parser.add_argument("--never-ready", action="store_true")
    options = parser.parse_args()
    if options.never_ready:
        asyncio.run(asyncio.sleep(3600))
    key = options.config.read_text().strip().removeprefix("api-key: ")
    fake = Fake(options.weight_version, 0.002, key)
    web.run_app(fake.application(), host="127.0.0.1", port=options.port, print=None)


if __name__ == "__main__":
    main()
