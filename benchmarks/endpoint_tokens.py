"""Checks that the tokens trained through the endpoint are the sampled ones, and measures a turn's bookkeeping.

Conversations: official clients play tool loops of several turns at once against the endpoint, in each dialect, over the
torch engine with a tiny random model that is given new weights meanwhile; every eighth rollout is a harness with three
subagents, parallel calls and two compactions. Every captured token, log-probability, version and prompt is compared with
the input and output of the engine, and every sampled token must be trained once (``mismatches``: turns that differ, and
rollouts whose trained tokens are not the sampled ones; by dialect in ``dialects``).

Bookkeeping: one conversation of 128 turns over an engine that answers at once, so that the rest is the endpoint's own
work: reading the request, finding its thread, encoding the new text, taking the turn, writing the answer. CPU time per
turn around turn 128 over that around turn 8 (``ratio``). The engine's own reading of the prompt is left out, and so is
the client, which sends a longer request with every turn.

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
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import structlog

from benchmarks._agent_harness import SPEAKERS, client_for, play
from benchmarks._needs import why_not
from benchmarks._report import median_and_spread, report
from services.common.config.processes.services import EndpointConfig
from services.common.records.types import Sampling, Segment
from services.common.telemetry.accounts import TimeAccount
from services.common.telemetry.components import replica
from services.common.text.chat import Chat
from services.common.text.huggingface import load_model, load_tokenizer, named_weights
from services.common.tiny.models import build
from services.inference.endpoint.dialects.base import ItemLimits
from services.inference.endpoint.dialects.chat import CHAT, ChatRequest, ChatWriter
from services.inference.endpoint.server import EndpointServer
from services.inference.endpoint.sessions import ServedSession
from services.inference.engine.base import FinishReason, Generation, GenerationRequest
from services.inference.engine.torch.engine import TorchEngine
from services.inference.engine.weight_update import WeightUpdate
from services.inference.rollouts.policies import RolloutPolicy, ServedPolicy
from services.inference.workflows.agents.captured import CapturedSession

POLICY = "model0"
TURNS, AT_ONCE, NEW_TOKENS, CONTEXT = 5, 8, 24, 4096
EARLY, LATE, AROUND = 8, 128, 4  # turns that are compared, and how many on either side of them
HARNESS = 8  # every so many rollouts is a harness
ADD = {
    "name": "add",
    "description": "Add.",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
}
TOOLS: list[Any] = [{"type": "function", "function": ADD}]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="at most a minute")
    parser.add_argument("--conversations", type=int, help=f"each of {TURNS} turns, or a harness (600; 144)")
    parser.add_argument("--dialects", nargs="+", choices=SPEAKERS, default=list(SPEAKERS))
    options = parser.parse_args()
    count = options.conversations or (144 if options.quick else 600)
    no_anthropic = why_not("anthropic") if "messages" in options.dialects else None
    dialects = [dialect for dialect in options.dialects if not (no_anthropic and dialect == "messages")]
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    repeats = 8 if options.quick else 30
    with tempfile.TemporaryDirectory() as folder:
        build(Path(folder), seed=1)
        began = time.monotonic()
        compared = asyncio.run(_conversations(Path(folder), count, dialects))
        wall_s = time.monotonic() - began
        early, late = asyncio.run(_bookkeeping(Path(folder), repeats))
    ratio, spread = median_and_spread([b / a for a, b in zip(early, late, strict=True)])
    mismatches = sum(each["mismatches"] for each in compared.values())
    report(
        "endpoint_tokens",
        statistics.median(late) * 1e6,
        statistics.median(early) * 1e6,
        ratio,
        spread,
        unit=f"microseconds of bookkeeping per turn, around turn {LATE} (ours) and {EARLY} (theirs)",
        conversations=count,
        turns=TURNS,
        mismatches=mismatches,
        dialects=compared,
        wall_s=wall_s,
        repeats=repeats,
        left_out={"messages": no_anthropic} if no_anthropic else {},
    )
    sys.exit(bool(mismatches))


# -- conversations ------------------------------------------------------------------------------------------------


class _Recorded:
    """An engine that keeps its requests and answers, by rollout."""

    def __init__(self, engine: TorchEngine) -> None:
        self.engine = engine
        self.said: dict[str, list[tuple[GenerationRequest, Generation]]] = {}

    async def generate(self, request: GenerationRequest) -> Generation:
        generation = await self.engine.generate(request)
        self.said.setdefault(request.request_id.split("/")[0], []).append((request, generation))
        return generation

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)


async def _conversations(folder: Path, count: int, dialects: Sequence[str]) -> dict[str, dict[str, int]]:
    """What was compared, by dialect."""
    model = load_model(folder, "float32")
    weights = {name: tensor.clone() for name, tensor in dict(named_weights(model)).items()}
    engine = TorchEngine(model, num_slots=AT_ONCE, context_length=CONTEXT)
    recorded = _Recorded(engine)
    chat = Chat(load_tokenizer(folder))
    policy = ServedPolicy(name=POLICY, engine=recorded, chat=chat, context_length=CONTEXT)  # type: ignore[arg-type]
    server = EndpointServer(EndpointConfig(port=0), "127.0.0.1", setting="port")
    await engine.start()
    await server.start()
    totals = {dialect: _Compared() for dialect in dialects}
    numbers = iter(range(count))
    transport = httpx.AsyncHTTPTransport()

    async def roll() -> None:
        for number in numbers:
            session, dialect = _session(policy, str(number), number), dialects[number % len(dialects)]
            with server.opened(session) as session_id:
                async with _client(dialect, server, session_id, transport) as client:
                    if number % HARNESS == HARNESS - 1:
                        await play(dialect, client, f"question {number}", streams=lambda even=number % 2 == 0: even)
                    else:
                        await _loop(dialect, client, number)
            if number % 50 == 49:
                await engine.update(WeightUpdate.full(weights, engine.version + 1))
            totals[dialect].add(recorded.said.pop(str(number)), session)

    try:
        await asyncio.gather(*(roll() for _ in range(AT_ONCE)))
    finally:
        await transport.aclose()
        await server.stop()
        await engine.stop()
    return {dialect: compared.told() for dialect, compared in totals.items()}


def _session(policy: ServedPolicy, name: str, seed: int) -> CapturedSession:
    client = RolloutPolicy(policy, request_prefix=name, seed=seed * 1000, account=TimeAccount(replica("a")))
    return CapturedSession({POLICY: client}, Sampling(max_new_tokens=NEW_TOKENS))


class _Kept(httpx.AsyncBaseTransport):
    """One pool of connections for many clients."""

    def __init__(self, transport: httpx.AsyncHTTPTransport) -> None:
        self._transport = transport

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        return await self._transport.handle_async_request(request)


@asynccontextmanager
async def _client(
    dialect: str, server: EndpointServer, session_id: str, transport: httpx.AsyncHTTPTransport
) -> AsyncIterator[Any]:
    kept = None if dialect == "messages" else httpx.AsyncClient(transport=_Kept(transport))
    async with client_for(dialect, server.base_url, session_id, kept) as client:
        yield client


async def _loop(dialect: str, client: Any, number: int) -> None:
    """A tool loop; every third one streams."""
    speaker = SPEAKERS[dialect](client, "Be brief.", ADD)
    speaker.hears(f"question {number}")
    for turn in range(TURNS):
        await speaker.says(stream=number % 3 == 0)
        speaker.is_answered({f"{turn}": f"result {turn} of {number}"})


class _Compared:
    """The sums over rollouts of one dialect."""

    def __init__(self) -> None:
        self._rollouts = self._mismatches = self._tokens = self._sequences = self._children = 0
        self._versions: set[int] = set()

    def add(self, said: Sequence[tuple[GenerationRequest, Generation]], session: CapturedSession) -> None:
        """Count the turns that differ; ``said``: what the engine was asked in this rollout, and answered."""
        answers: dict[tuple[int, ...], list[Any]] = {}  # two requests may have one prompt
        for request, generation in said:
            answers.setdefault(request.prompt_ids, []).append(_flat(generation.segments))
        turns = tokens = 0
        sequences = session.sequences(0.0)
        for sequence in sequences:
            ids: list[int] = []
            turn: list[Segment] = []
            for segment in (*sequence.segments, None):
                if segment is not None and segment.is_policy:
                    turn.append(segment)
                    self._versions.add(segment.weight_version)
                    continue
                if turn:
                    given = answers.get(tuple(ids), [])
                    if _flat(turn) in given:
                        given.remove(_flat(turn))
                    else:
                        self._mismatches += 1
                    turns += 1
                    ids += [t for s in turn for t in s.token_ids.tolist()]
                    turn = []
                if segment is not None:
                    ids += segment.token_ids.tolist()
            tokens += sequence.num_trained_tokens
        sampled = sum(len(generation.token_ids) for _, generation in said)
        self._mismatches += abs(turns - len(said)) + (tokens != sampled)
        self._rollouts += 1
        self._tokens += tokens
        self._sequences += len(sequences)
        self._children += sum(sequence.parent is not None for sequence in sequences)

    def told(self) -> dict[str, int]:
        return {
            "rollouts": self._rollouts,
            "mismatches": self._mismatches,
            "trained_tokens": self._tokens,
            "sequences": self._sequences,
            "with_parents": self._children,
            "versions": len(self._versions),
        }


def _flat(segments: Sequence[Segment]) -> list[Any]:
    return [(s.token_ids.tolist(), s.logprobs.tolist(), s.weight_version, s.mixed_cache) for s in segments]


# -- bookkeeping --------------------------------------------------------------------------------------------------


class _Instant:
    """A policy that answers the same at once without reading: only the work around the policy is timed."""

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
    session = ServedSession(
        CapturedSession({POLICY: _Instant(chat)}, Sampling()), ItemLimits(tool_result_chars=1 << 18)
    )
    messages: list[Any] = [{"role": "user", "content": f"question {repeat}"}]
    times = []
    for turn in range(LATE + AROUND):
        raw = json.dumps({"messages": messages, "model": POLICY, "tools": TOOLS}).encode()
        began = time.thread_time()
        asked = session.read(raw.decode(), CHAT)
        assert isinstance(asked.fields, ChatRequest)
        taken = await session.captured.take_turn(asked.turn, asked.locate)
        writer = ChatWriter(asked.fields, POLICY, chat, thinks=False)
        session.answered(writer.id, asked, taken)
        answer = writer.whole(taken)
        json.dumps(answer)
        times.append(time.thread_time() - began)
        messages.append(dict(answer["choices"][0]["message"]))
        messages.append({"role": "tool", "tool_call_id": str(turn), "content": f"result {turn} of {repeat}"})
    assert len(session.captured.sequences(0.0)) == 1, "the conversation was not recognised"
    return times


if __name__ == "__main__":
    main()
