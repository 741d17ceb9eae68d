"""The endpoint over a real engine with a tiny model, and an engine that records its generations."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI

from services.common.config.processes import EndpointConfig
from services.common.records import Purpose, Sampling, Segment
from services.common.telemetry.accounts import TimeAccount
from services.common.text.chat import Chat
from services.inference.endpoint.server import SESSION_HEADER, EndpointServer
from services.inference.engine.base import Engine, Generation, GenerationRequest
from services.inference.rollouts import RolloutPolicy, ServedPolicy
from services.inference.workflows.agents import CapturedSession, SessionSettings
from services.inference.workflows.base import WorkflowContext
from tests.unit.inference.fakes import FakeGateway

POLICY = "model0"
ADD: dict[str, Any] = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
}


@functools.cache
def tiny_model() -> Path:
    from services.common.tiny import build

    directory = Path(tempfile.mkdtemp(prefix="rollmill-tiny-"))
    build(directory, seed=1)
    return directory


class Recorded:
    """An engine that records prompts and generations by request."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.said: list[tuple[GenerationRequest, Generation]] = []

    async def generate(self, request: GenerationRequest) -> Generation:
        generation = await self.engine.generate(request)
        self.said.append((request, generation))
        return generation

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)


@asynccontextmanager
async def torch_policy(**settings: Any) -> AsyncIterator[ServedPolicy]:
    from services.common.text.chat import load_model, load_tokenizer
    from services.inference.engine.torch.engine import TorchEngine

    engine = TorchEngine(load_model(tiny_model(), "float32"), **{"num_slots": 8, "context_length": 4096, **settings})
    await engine.start()
    try:
        yield ServedPolicy(
            name=POLICY,
            engine=Recorded(engine),  # type: ignore[arg-type]
            chat=Chat(load_tokenizer(tiny_model())),
            context_length=4096,
        )
    finally:
        await engine.stop()


@asynccontextmanager
async def serving() -> AsyncIterator[EndpointServer]:
    server = EndpointServer(EndpointConfig(port=0), "127.0.0.1", setting="inference.a.endpoint.port")
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


def session_of(
    policy: ServedPolicy, name: str = "g/0/0", seed: int = 1, purpose: Purpose = Purpose.TRAIN, **settings: Any
) -> CapturedSession:
    sampling = settings.pop("sampling", Sampling(max_new_tokens=24))
    client = RolloutPolicy(policy, request_prefix=name, seed=seed, account=TimeAccount("replica/a"))
    return CapturedSession({POLICY: client}, sampling, SessionSettings(**settings), purpose)


def context_of(policy: ServedPolicy, server: EndpointServer, **gateway: Any) -> WorkflowContext:
    client = RolloutPolicy(policy, request_prefix="g/0/0", seed=1, account=TimeAccount("replica/a"))
    return WorkflowContext(
        policies={POLICY: client},
        gateway=FakeGateway(**gateway),
        sampling=Sampling(max_new_tokens=200),
        seed=1,
        episode_seed=2,
        endpoint=server,
    )


@asynccontextmanager
async def client_of(server: EndpointServer, session: str, **settings: Any) -> AsyncIterator[AsyncOpenAI]:
    client = AsyncOpenAI(
        base_url=server.base_url,
        api_key="unused",
        default_headers={SESSION_HEADER: session},
        **{"max_retries": 0, "timeout": 30.0, **settings},
    )
    try:
        yield client
    finally:
        await client.close()


@asynccontextmanager
async def anthropic_of(server: EndpointServer, session: str, **settings: Any) -> AsyncIterator[Any]:
    """Anthropic's client with the session as its key."""
    import anthropic

    client = anthropic.AsyncAnthropic(
        base_url=server.base_url, api_key=session, **{"max_retries": 0, "timeout": 30.0, **settings}
    )
    try:
        yield client
    finally:
        await client.close()


@asynccontextmanager
async def asking(server: EndpointServer, session: CapturedSession) -> AsyncIterator[AsyncOpenAI]:
    """OpenAI's client in a session that is open until the block ends."""
    with server.opened(session) as session_id:
        async with client_of(server, session_id) as client:
            yield client


@asynccontextmanager
async def asking_anthropic(server: EndpointServer, session: CapturedSession) -> AsyncIterator[Any]:
    with server.opened(session) as session_id:
        async with anthropic_of(server, session_id) as client:
            yield client


async def play_tools(client: AsyncOpenAI, turns: int, question: str = "go", **request: Any) -> list[Mapping[str, Any]]:
    """A conversation in the way of agent frameworks: the client's answer is appended, tools are answered."""
    messages: list[Any] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": question}]
    for turn in range(turns):
        answer = await client.chat.completions.create(model=POLICY, messages=messages, tools=[ADD], **request)
        said = answer.choices[0].message
        messages.append(said.model_dump(exclude_none=True))
        if said.tool_calls:
            messages += [{"role": "tool", "tool_call_id": c.id, "content": f"{turn}"} for c in said.tool_calls]
        else:
            messages.append({"role": "user", "content": f"and then, {turn}?"})
    return messages


def mismatches(said: Sequence[tuple[GenerationRequest, Generation]], session: CapturedSession) -> int:
    """Differences between the trained tokens, prompts and log-probabilities and those of the engine."""
    wrong = 0
    by_prompt: dict[tuple[int, ...], list[list[Any]]] = {}  # several may have been asked the same
    for request, generation in said:
        by_prompt.setdefault(request.prompt_ids, []).append(_pairs(generation.segments))
    num_turns = 0
    for sequence in session.sequences(0.0):
        ids: list[int] = []
        turn: list[Any] = []
        for segment in (*sequence.segments, None):
            if segment is not None and segment.is_policy:
                turn.append(segment)
                continue
            if turn:
                num_turns += 1
                given = by_prompt.get(tuple(ids), [])
                wrong += _pairs(turn) not in given
                ids += [t for s in turn for t in s.token_ids.tolist()]
                turn = []
            if segment is not None:
                ids += segment.token_ids.tolist()
    return wrong + abs(num_turns - len(said))


def _pairs(segments: Sequence[Segment]) -> list[Any]:
    return [list(zip(s.token_ids.tolist(), s.logprobs.tolist(), strict=True)) for s in segments]
