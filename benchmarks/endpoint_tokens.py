"""Is what is trained through the endpoint exactly what was sampled, and does a turn's bookkeeping stay as cheap?

Conversations: OpenAI's client plays tool loops of several turns at once against the endpoint, over the torch engine with a
tiny random model that is given new weights meanwhile. Every captured token, log-probability, version and prompt is
compared with what the engine was given and gave (``mismatches``: turns that differ; ``trained_tokens``).

Bookkeeping: one conversation of 128 turns over an engine that answers at once, so that what is left is the endpoint's own
work: reading the request, finding its thread, making ids of what is new, taking the turn, writing the answer. CPU time per
turn around turn 128 over that around turn 8 (``ratio``). The engine's own reading of the prompt is left out, and so is the
client, whose request grows with every turn.

    python benchmarks/endpoint_tokens.py [--quick]
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import logging
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import structlog
from _report import median_and_spread, report
from openai import AsyncOpenAI

from services.common.accounts import TimeAccount
from services.common.chat import Chat
from services.common.config.services import EndpointConfig
from services.common.models import load_model, load_tokenizer, named_weights
from services.common.tiny_models import build
from services.common.types import Sampling, Segment
from services.inference.endpoint.answers import Heading, completion
from services.inference.endpoint.schema import read_request
from services.inference.endpoint.server import SESSION_HEADER, EndpointServer, ServedSession
from services.inference.engine.base import FinishReason, Generation, GenerationRequest
from services.inference.engine.torch_engine import TorchEngine
from services.inference.engine.weight_update import WeightUpdate
from services.inference.policies import RolloutPolicy, ServedPolicy
from services.inference.workflows.captured import CapturedSession

POLICY = "model0"
TURNS, AT_ONCE, NEW_TOKENS, CONTEXT = 5, 8, 24, 4096
EARLY, LATE, AROUND = 8, 128, 4  # turns that are compared, and how many on either side of them
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
    }
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="at most a minute")
    parser.add_argument("--conversations", type=int, default=500, help=f"each of {TURNS} turns")
    options = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    repeats = 8 if options.quick else 30
    with tempfile.TemporaryDirectory() as folder:
        build(Path(folder), seed=1)
        began = time.monotonic()
        compared = asyncio.run(_conversations(Path(folder), options.conversations))
        wall_s = time.monotonic() - began
        early, late = asyncio.run(_bookkeeping(Path(folder), repeats))
    ratio, spread = median_and_spread([b / a for a, b in zip(early, late, strict=True)])
    report(
        "endpoint_tokens",
        statistics.median(late) * 1e6,
        statistics.median(early) * 1e6,
        ratio,
        spread,
        unit=f"microseconds of bookkeeping per turn, around turn {LATE} (ours) and {EARLY} (theirs)",
        conversations=options.conversations,
        turns=TURNS,
        **compared,
        wall_s=wall_s,
        repeats=repeats,
    )
    sys.exit(bool(compared["mismatches"]))


# -- conversations ------------------------------------------------------------------------------------------------


class _Recorded:
    """An engine with what it was asked and what it said, by rollout."""

    def __init__(self, engine: TorchEngine) -> None:
        self.engine = engine
        self.said: dict[str, list[tuple[GenerationRequest, Generation]]] = {}

    async def generate(self, request: GenerationRequest) -> Generation:
        generation = await self.engine.generate(request)
        self.said.setdefault(request.request_id.split("/")[0], []).append((request, generation))
        return generation

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)


async def _conversations(folder: Path, count: int) -> dict[str, int]:
    model = load_model(folder, "float32")
    weights = {name: tensor.clone() for name, tensor in dict(named_weights(model)).items()}
    engine = TorchEngine(model, num_slots=AT_ONCE, context_length=CONTEXT)
    recorded = _Recorded(engine)
    chat = Chat(load_tokenizer(folder))
    policy = ServedPolicy(name=POLICY, engine=recorded, chat=chat, context_length=CONTEXT)  # type: ignore[arg-type]
    server = EndpointServer(EndpointConfig(port=0), "127.0.0.1", setting="port")
    await engine.start()
    await server.start()
    totals = {"mismatches": 0, "trained_tokens": 0, "sequences": 0, "versions": 0}
    versions: set[int] = set()
    numbers = iter(range(count))
    transport = httpx.AsyncHTTPTransport()

    async def play() -> None:
        for number in numbers:
            session = _session(policy, str(number), number)
            with server.opened(session) as session_id:
                await _play(server, session_id, number, transport)
            if number % 50 == 49:
                await engine.update(WeightUpdate.full(weights, engine.version + 1))
            wrong, tokens, seen = _compare(recorded.said.pop(str(number)), session)
            totals["mismatches"] += wrong
            totals["trained_tokens"] += tokens
            totals["sequences"] += len(session.sequences(0.0))
            versions.update(seen)

    try:
        await asyncio.gather(*(play() for _ in range(AT_ONCE)))
    finally:
        await transport.aclose()
        await server.stop()
        await engine.stop()
    return {**totals, "versions": len(versions)}


def _session(policy: ServedPolicy, name: str, seed: int) -> CapturedSession:
    client = RolloutPolicy(policy, request_prefix=name, seed=seed * 1000, account=TimeAccount("replica/a"))
    return CapturedSession({POLICY: client}, Sampling(max_new_tokens=NEW_TOKENS))


class _Kept(httpx.AsyncBaseTransport):
    """One pool of connections for many clients."""

    def __init__(self, transport: httpx.AsyncHTTPTransport) -> None:
        self._transport = transport

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        return await self._transport.handle_async_request(request)


async def _play(server: EndpointServer, session_id: str, number: int, transport: httpx.AsyncHTTPTransport) -> None:
    """Every third conversation streams."""
    messages: list[Any] = [{"role": "user", "content": f"question {number}"}]
    headers = {SESSION_HEADER: session_id}
    async with httpx.AsyncClient(transport=_Kept(transport)) as http:
        client = AsyncOpenAI(
            base_url=server.base_url, api_key="-", default_headers=headers, http_client=http, max_retries=0
        )
        for turn in range(TURNS):
            ask: dict[str, Any] = {"model": POLICY, "messages": messages, "tools": TOOLS}
            if number % 3 == 0:
                stream = await client.chat.completions.create(**ask, stream=True)
                text = "".join([c.choices[0].delta.content or "" async for c in stream])
                messages.append({"role": "assistant", "content": text})
            else:
                answer = await client.chat.completions.create(**ask)
                messages.append(answer.choices[0].message.model_dump(exclude_none=True))
            messages.append({"role": "tool", "tool_call_id": f"{turn}", "content": f"result {turn} of {number}"})


def _compare(
    said: Sequence[tuple[GenerationRequest, Generation]], session: CapturedSession
) -> tuple[int, int, set[int]]:
    """Turns that differ, trained tokens, and their versions."""
    asked: dict[tuple[int, ...], Generation] = {request.prompt_ids: generation for request, generation in said}
    wrong, turns, tokens = 0, 0, 0
    versions: set[int] = set()
    for sequence in session.sequences(0.0):
        ids: list[int] = []
        turn: list[Segment] = []
        for segment in (*sequence.segments, None):
            if segment is not None and segment.is_policy:
                turn.append(segment)
                versions.add(segment.weight_version)
                continue
            if turn:
                given = asked.get(tuple(ids))
                wrong += given is None or _flat(turn) != _flat(given.segments)
                turns += 1
                ids += [t for s in turn for t in s.token_ids.tolist()]
                turn = []
            if segment is not None:
                ids += segment.token_ids.tolist()
        tokens += sequence.num_trained_tokens
    return wrong + abs(turns - len(said)), tokens, versions


def _flat(segments: Sequence[Segment]) -> list[Any]:
    return [(s.token_ids.tolist(), s.logprobs.tolist(), s.weight_version, s.mixed_cache) for s in segments]


# -- bookkeeping --------------------------------------------------------------------------------------------------


class _Instant:
    """A policy that answers the same at once and reads nothing: what is timed is what happens round it."""

    name = POLICY
    context_length = 1 << 30

    def __init__(self, chat: Chat) -> None:
        self.chat = chat
        ids = [*chat.encode("the tool said so, and now I ask again, once more"), chat.end_of_turn_id]
        self._generation = Generation(
            segments=(Segment.policy(ids, [-0.5] * len(ids), 0),), finish_reason=FinishReason.STOP
        )

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, **_: Any) -> Generation:
        return self._generation


async def _bookkeeping(folder: Path, repeats: int) -> tuple[list[float], list[float]]:
    """Seconds per turn, early and late, one pair per conversation."""
    chat = Chat(load_tokenizer(folder))
    early, late = [], []
    for repeat in range(repeats + 1):
        gc.collect()
        gc.disable()
        times = await _one(chat, repeat)
        gc.enable()
        if repeat:  # the first warms caches
            early.append(statistics.median(times[EARLY - AROUND : EARLY + AROUND]))
            late.append(statistics.median(times[LATE - AROUND : LATE + AROUND]))
    return early, late


async def _one(chat: Chat, repeat: int) -> list[float]:
    session = ServedSession(CapturedSession({POLICY: _Instant(chat)}, Sampling()))
    messages: list[Any] = [{"role": "user", "content": f"question {repeat}"}]
    times = []
    for turn in range(LATE + AROUND):
        raw = json.dumps({"messages": messages, "model": POLICY, "tools": TOOLS}).encode()
        began = time.thread_time()
        text = raw.decode()
        body = session.read(text)
        ask = read_request(body.fields).ask(POLICY)
        taken = await session.captured.take_turn(ask, session.locator(ask, body, text))
        session.answered(body.head, taken.thread)
        answer = completion(Heading(model=POLICY), taken, None)
        json.dumps(answer)
        times.append(time.thread_time() - began)
        messages.append(dict(answer["choices"][0]["message"]))
        messages.append({"role": "tool", "tool_call_id": str(turn), "content": f"result {turn} of {repeat}"})
    assert len(session.captured.sequences(0.0)) == 1, "the conversation was not recognised"
    return times


if __name__ == "__main__":
    main()
