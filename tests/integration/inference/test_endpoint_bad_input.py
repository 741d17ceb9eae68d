"""Bad input at the endpoint, in each dialect: refused in the dialect's own shape, cut at a bound, or without effect."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest

from services.common.config.processes import EndpointConfig
from services.common.records import Sampling
from services.inference.endpoint import forms
from services.inference.endpoint import server as endpoint_server
from services.inference.endpoint.server import EndpointServer
from tests.integration.inference.endpoint_peers import mismatches, session_of, torch_policy
from tests.unit.inference.fakes import served_policy
from tests.waiting import until

USER = {"role": "user", "content": "go"}
PATHS = {"chat": "/chat/completions", "responses": "/responses", "messages": "/messages"}
ITEMS = {"chat": "messages", "responses": "input", "messages": "messages"}
DIALECTS = list(PATHS)
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'


@asynccontextmanager
async def posting(server: EndpointServer, **headers: str) -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(headers=headers) as http:
        yield http


async def post(server: EndpointServer, path: str, body: Any, **headers: str) -> tuple[int, Any]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with posting(server, **{"Content-Type": "application/json", **headers}) as http:
        async with http.post(server.base_url + path, data=io.BytesIO(data)) as answer:
            return answer.status, await answer.json()


def told(dialect: str, body: Any) -> tuple[str, str]:
    """Kind and message of an error, which must have the shape of its dialect."""
    error = body["error"]
    if dialect == "messages":
        assert set(body) == {"type", "error", "request_id"} and body["type"] == "error"
        assert set(error) == {"type", "message"}
    else:
        assert set(body) == {"error"} and set(error) == {"message", "type", "param", "code"}
    return error["type"], error["message"]


# -- sessions and keys ------------------------------------------------------------------------------------------------


KEYS = [{}, {"Authorization": "Bearer wrong"}, {"X-Api-Key": "wrong"}, {"X-Session-ID": "wrong"}]


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_a_wrong_key_is_refused_in_the_shape_of_the_dialect(server: EndpointServer, dialect: str) -> None:
    kind = "authentication_error" if dialect == "messages" else "invalid_request_error"
    for headers in KEYS:
        status, body = await post(server, PATHS[dialect], {ITEMS[dialect]: [USER]}, **headers)
        assert status == 401
        assert told(dialect, body)[0] == kind and "no rollout has this session" in told(dialect, body)[1]


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_the_session_of_another_rollout_is_refused(server: EndpointServer, dialect: str) -> None:
    mine, other = session_of(await served_policy(["mine"])), session_of(await served_policy(["other"]))
    body = {ITEMS[dialect]: [USER]}
    with server.opened(mine) as a:
        with server.opened(other) as b:
            status, answer = await post(server, PATHS[dialect], body, **{"X-Session-ID": b, "X-Api-Key": a})
            kind = "permission_error" if dialect == "messages" else "invalid_request_error"
            assert status == 403 and told(dialect, answer)[0] == kind
        status, _ = await post(server, PATHS[dialect], body, **{"X-Session-ID": b, "X-Api-Key": a})
        assert status == 401, "a header of a rollout that is over counts before the key"
        for headers in (
            {"X-Session-ID": a},
            {"X-Rollmill-Session": a, "Authorization": "Bearer EMPTY"},
            {"X-Api-Key": a},
        ):
            assert (await post(server, PATHS[dialect], body, **headers))[0] == 200
    assert len(mine.sequences(0.0)) == 3 and other.sequences(0.0) == ()


async def test_paths_that_are_not_served_are_told_in_the_shape_of_the_client(server: EndpointServer) -> None:
    status, body = await post(server, "/completions", {})
    assert status == 404 and "/v1/messages" in told("chat", body)[1]
    status, body = await post(server, "/complete", {}, **{"anthropic-version": "2023-06-01"})
    assert status == 404 and told("messages", body)[0] == "not_found_error"


# -- bodies -----------------------------------------------------------------------------------------------------------


BODIES = [
    (b"", "no JSON"), (b"[]", "no JSON"), (b"\xff", "no UTF-8"), (b"{}", "is missing"), (b'{"ITEMS": 3}', "no JSON"),
    (b'{"ITEMS": [3]}', "must be an object"), (b'{"ITEMS": [' + b"[" * 90_000, "no JSON"),
    (b'{"ITEMS": [{"role": "user", "content": 3}]}', "int"), (b'{"ITEMS": [{"role": "user", "content": [3]}]}', "content[0]"),
    (b'{"ITEMS": [], "ITEMS": []}', "twice"), (b'{"model": 3, "ITEMS": []}', "model"),
    (b'{"tools": [3], "ITEMS": []}', "tools"), (b'{"tools": [{"type": "function"}], "ITEMS": []}', "tool 0"),
    (b'{"ITEMS": [{"role": "user", "content": "\\ud800"}]}', "surrogates"),
]  # fmt: skip


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_bodies_that_cannot_be_read_are_refused_by_name(server: EndpointServer, dialect: str) -> None:
    session = session_of(await served_policy(["x"]))
    with server.opened(session) as session_id:
        for body, word in BODIES:
            named = body.replace(b"ITEMS", ITEMS[dialect].encode())
            status, answer = await post(server, PATHS[dialect], named, **{"X-Session-ID": session_id})
            kind, message = told(dialect, answer)
            assert (status, kind) == (400, "invalid_request_error") and word in message, (body[:60], message)
    assert session.sequences(0.0) == ()


def saying(content: Any, role: str = "user") -> list[Any]:
    return [{"role": role, "content": content}]


RESULT = {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "image", "source": {}}]}
FUNCTION = {"type": "function", "name": "add"}
REFUSED: dict[str, list[tuple[dict[str, Any], int, str]]] = {
    "chat": [
        ({"n": 2}, 400, "n:"),
        ({"ITEMS": []}, 400, "messages"),
        ({"ITEMS": saying("", "alien")}, 400, "alien"),
        ({"ITEMS": saying([{"type": "image_url"}])}, 400, "text"),
        ({"ITEMS": saying([{"type": "text", "text": "a"}, "text"])}, 400, "messages[0].content[1]"),
        ({"ITEMS": [USER, *saying("x", "assistant")]}, 400, "end with"),
        ({"ITEMS": saying("long " * 5000)}, 400, "tokens"),
        ({"model": "gpt"}, 404, "model0"),
        ({"tool_choice": "required"}, 400, "tool_choice"),
        ({"response_format": {"type": "json_object"}}, 400, "response_format"),
        ({"top_logprobs": 5, "logprobs": True}, 400, "top_logprobs"),
        ({"stop": [""]}, 400, "stop"),
        ({"temperature": 7}, 400, "temperature"),
        ({"presence_penalty": 0.5}, 400, "presence_penalty"),
        ({"logit_bias": {"5": 1.0}}, 400, "logit_bias"),
        ({"repetition_penalty": 1.1}, 400, "repetition_penalty"),
    ],
    "responses": [
        ({"ITEMS": []}, 400, "end with"),
        ({"ITEMS": [{"type": "item_reference", "id": "x"}]}, 400, "item_reference"),
        ({"ITEMS": saying([{"type": "input_image", "image_url": "x"}])}, 400, "input_image"),
        ({"ITEMS": [{"type": "function_call", "call_id": "1"}]}, 400, "name and arguments"),
        ({"tools": [{"type": "web_search"}]}, 400, "web_search"),
        ({"tools": [FUNCTION, FUNCTION]}, 400, "two tools"),
        ({"tools": [{**FUNCTION, "parameters": {"maximum": 10**30}}]}, 400, "too large"),
        ({"text": {"format": {"type": "json_object"}}}, 400, "answers are text"),
        ({"truncation": "auto"}, 400, "truncation"),
        ({"background": True}, 400, "background"),
        ({"conversation": "c"}, 400, "conversation"),
        ({"include": ["message.output_text.logprobs"]}, 400, "log-probabilities"),
        ({"previous_response_id": "resp_x"}, 404, "resp_x"),
    ],
    "messages": [
        ({"ITEMS": [USER, *saying("It is (", "assistant")]}, 400, "end with"),
        ({"ITEMS": saying([{"type": "image", "source": {}}])}, 400, "image"),
        ({"ITEMS": saying([RESULT])}, 400, "messages[0].content[0].content[0]"),
        ({"ITEMS": saying("long " * 5000)}, 400, "prompt is too long"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, 400, "web_search_20250305"),
        ({"tools": [{"name": "add", "input_schema": {"type": "list"}}]}, 400, "'list'"),
        ({"tools": [{"name": "add", "input_schema": "none"}]}, 400, "no JSON Schema"),
        ({"tools": [{"name": "", "input_schema": {}}]}, 400, "no name"),
        ({"tool_choice": {"type": "any"}}, 400, "tool_choice"),
        ({"stop_sequences": [""]}, 400, "stop_sequences"),
        ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, 400, "clear_tool"),
        ({"model": "claude"}, 404, "model0"),
    ],
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("dialect", DIALECTS)
async def test_what_cannot_be_done_is_refused_by_name(server: EndpointServer, dialect: str, stream: bool) -> None:
    session = session_of(await served_policy(["x"]))
    with server.opened(session) as session_id:
        for change, status, word in REFUSED[dialect]:
            body = {ITEMS[dialect] if name == "ITEMS" else name: value for name, value in change.items()}
            body = {ITEMS[dialect]: [USER], "stream": stream, **body}
            given, answer = await post(server, PATHS[dialect], body, **{"X-Session-ID": session_id})
            kind, message = told(dialect, answer)
            not_found = dialect == "messages" and status == 404
            assert (given, kind) == (status, "not_found_error" if not_found else "invalid_request_error"), change
            assert word in message, (change, message)
    assert session.sequences(0.0) == ()


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_a_body_above_the_bound_is_refused(dialect: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint_server, "BODY_BYTES", 2048)
    server = EndpointServer(EndpointConfig(port=0), "127.0.0.1", setting="x")
    await server.start()
    try:
        with server.opened(session_of(await served_policy(["x"]))) as session_id:
            body = {ITEMS[dialect]: [{"role": "user", "content": "a" * 4096}]}
            status, answer = await post(server, PATHS[dialect], body, **{"X-Session-ID": session_id})
        assert status == 413 and "the bound is 2048 bytes" in told(dialect, answer)[1]
    finally:
        await server.stop()


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_fields_that_no_dialect_knows_change_nothing(server: EndpointServer, dialect: str) -> None:
    session = session_of(await served_policy(["x"]))
    body = {"unheard_of": {"a": [1]}, ITEMS[dialect]: [{**USER, "cache": 1}], "service_tier": "auto", "user": "me"}
    with server.opened(session) as session_id:
        status, _ = await post(server, PATHS[dialect], body, **{"X-Session-ID": session_id})
    assert status == 200 and len(session.sequences(0.0)) == 1


# -- results of tools -------------------------------------------------------------------------------------------------


def with_result(dialect: str, answer: Any, result: str) -> list[Any]:
    """The conversation after an answer with one call."""
    if dialect == "chat":
        message = answer["choices"][0]["message"]
        return [USER, message, {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": result}]
    if dialect == "responses":
        call = answer["output"][-1]
        return [USER, *answer["output"], {"type": "function_call_output", "call_id": call["call_id"], "output": result}]
    block = {"type": "tool_result", "tool_use_id": answer["content"][-1]["id"], "content": result}
    return [USER, {"role": "assistant", "content": answer["content"]}, {"role": "user", "content": [block]}]


def tool(dialect: str) -> dict[str, Any]:
    function = {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}
    if dialect == "chat":
        return {"type": "function", "function": function}
    if dialect == "responses":
        return {"type": "function", **function}
    return {"name": "add", "input_schema": function["parameters"]}


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_a_long_result_is_cut_at_the_documented_bound(dialect: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forms, "TOOL_RESULT_CHARS", 512)
    server = EndpointServer(EndpointConfig(port=0), "127.0.0.1", setting="x")
    await server.start()
    policy = await served_policy([CALL, "one", "two"])
    session = session_of(policy, sampling=Sampling(max_new_tokens=200))
    engine: Any = policy.engine
    try:
        with server.opened(session) as session_id:
            ask = {"model": "default", "tools": [tool(dialect)], ITEMS[dialect]: [USER]}
            _, answer = await post(server, PATHS[dialect], ask, **{"X-Session-ID": session_id})
            ask[ITEMS[dialect]] = with_result(dialect, answer, "left " + "x" * 1_000_000 + " right")
            for _ in range(2):
                status, answer = await post(server, PATHS[dialect], ask, **{"X-Session-ID": session_id})
                assert status == 200
    finally:
        await server.stop()
    read = policy.chat.decode(engine.requests[1].prompt_ids)
    assert "left xxx" in read and " ...(cut)... " in read and "xxx right" in read and len(read) < 1500
    first, again = session.sequences(0.0)
    assert [segment.is_policy for segment in first.segments] == [False, True, False, True]
    assert again.parent == 0, "the repeated request goes on from the same answer"


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_arguments_that_no_client_can_read_stay_text_and_integers_of_any_size_are_arguments(
    server: EndpointServer, dialect: str
) -> None:
    """Half of a surrogate pair; an integer of more than 64 bits."""
    texts = {CALL.replace("1}", f"{value}}}"): stays for value, stays in (('"\\ud800"', True), (str(10**30), False))}
    session = session_of(await served_policy(list(texts)), sampling=Sampling(max_new_tokens=400))
    with server.opened(session) as session_id:
        for text, stays in texts.items():
            body = {"tools": [tool(dialect)], ITEMS[dialect]: [{"role": "user", "content": text[-9:]}]}
            status, answer = await post(server, PATHS[dialect], body, **{"X-Session-ID": session_id})
            assert status == 200 and ("<tool_call>" in json.dumps(answer)) is stays
            assert stays or str(10**30) in json.dumps(answer)


# -- streams that a client breaks off ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dialect", ["responses"])
async def test_a_stream_that_the_client_breaks_off_leaves_no_trace_and_the_rollout_goes_on(
    server: EndpointServer, dialect: str
) -> None:
    async with torch_policy() as policy:
        engine: Any = policy.engine
        session = session_of(policy, sampling=Sampling(max_new_tokens=2000, min_new_tokens=2000))
        body = {ITEMS[dialect]: [USER], "stream": True}
        with server.opened(session) as session_id:
            async with posting(server, **{"X-Session-ID": session_id}) as http:
                answer = await http.post(server.base_url + PATHS[dialect], json=body)
                await answer.content.readany()
                assert engine.health().running
                answer.close()
            await until(lambda: not engine.health().waiting + engine.health().running, "the abort")
            assert session.sequences(0.0) == () and session.failure is None
            limits = {"chat": "max_tokens", "responses": "max_output_tokens", "messages": "max_tokens"}
            again = {**body, "stream": False, limits[dialect]: 4}
            assert (await post(server, PATHS[dialect], again, **{"X-Session-ID": session_id}))[0] == 200
        (sequence,) = session.sequences(0.0)
        assert sequence.num_trained_tokens == 4
        assert mismatches(engine.said[-1:], session) == 0


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_a_stream_whose_engine_breaks_ends_with_an_error_event_and_an_infrastructure_failure(
    server: EndpointServer, dialect: str
) -> None:
    async with torch_policy() as policy:
        engine: Any = policy.engine
        session = session_of(policy, sampling=Sampling(max_new_tokens=2000, min_new_tokens=2000))
        with server.opened(session) as session_id:
            async with posting(server, **{"X-Session-ID": session_id}) as http:
                body = {ITEMS[dialect]: [USER], "stream": True}
                async with http.post(server.base_url + PATHS[dialect], json=body) as answer:
                    began = await answer.content.readany()
                    stopping = asyncio.create_task(engine.stop())
                    text = (began + await answer.content.read()).decode()
                    await stopping
        ends = {"chat": '"error":{"message"', "responses": "event: response.failed", "messages": "event: error"}
        assert ends[dialect] in text
        assert session.failure is not None and session.sequences(0.0) == ()
