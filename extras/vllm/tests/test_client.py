"""Requests to vLLM and the reading of its streams."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from extras.vllm.engine import VllmClient
from services.common.errors import InfrastructureError, InvalidRequestError
from services.common.kept_tokens import pack, unpack
from services.common.records import Sampling
from services.inference.engine.served.client import CallRequest, Chunk, VersionSpan


def call(*, suppress: bool = False, **sampling: Any) -> CallRequest:
    return CallRequest(
        rid="r",
        input_ids=(1, 2),
        max_new_tokens=9,
        sampling=Sampling(**sampling),
        stop_token_ids=(7, 8),
        suppress_stop=suppress,
        chunk_tokens=4,
    )


async def body(request: CallRequest, most_kept: int = 300) -> dict[str, Any]:
    client = VllmClient("http://127.0.0.1:1", "key", most_kept=most_kept)
    try:
        return client.body(request)
    finally:
        await client.close()


async def read(request: CallRequest, *rows: dict[str, Any]) -> list[Chunk | None]:
    client = VllmClient("http://127.0.0.1:1", "key", most_kept=300)
    try:
        reader = client.reader(request)
        return [reader(row) for row in rows]
    finally:
        await client.close()


def tokens(*pairs: tuple[int, float], tops: list[dict[int, float]] | None = None, **more: Any) -> dict[str, Any]:
    """A message with sampled tokens, as vLLM 0.32.0 writes it."""
    content = [
        {
            "token_id": token,
            "logprob": logprob,
            "rank": 1,
            "top_logprobs": [
                {"token_id": other, "logprob": value} for other, value in (tops[place] if tops else {}).items()
            ],
        }
        for place, (token, logprob) in enumerate(pairs)
    ]
    choice = {"index": 0, "token_ids": [token for token, _ in pairs], "logprobs": {"content": content}, **more}
    return {"request_id": "generate-tokens-r", "choices": [choice]}


def usage(cached: int | None = None) -> dict[str, Any]:
    details = {} if cached is None else {"prompt_tokens_details": {"cached_tokens": cached}}
    return {"choices": [], "usage": {"prompt_tokens": 2, "total_tokens": 4, **details}}


async def test_a_request_names_its_tokens_and_its_end() -> None:
    made = await body(call(temperature=0.7))
    assert (made["token_ids"], made["stream"], made["request_id"]) == ([1, 2], True, "r")
    parameters = made["sampling_params"]
    assert (parameters["temperature"], parameters["max_tokens"], parameters["stream_interval"]) == (0.7, 9, 4)
    assert (parameters["ignore_eos"], parameters["stop_token_ids"], parameters["logprobs"]) == (True, [7, 8], 0)
    assert "top_k" not in parameters and "min_tokens" not in parameters


async def test_stop_tokens_are_forbidden_for_a_whole_call() -> None:
    parameters = (await body(call(suppress=True)))["sampling_params"]
    assert parameters["min_tokens"] == parameters["max_tokens"] == 9


@pytest.mark.parametrize(("top_k", "asked"), [(5, 5), (0, 300), (400, 300)])
async def test_a_cut_distribution_asks_for_as_many_tokens_as_it_can_have(top_k: int, asked: int) -> None:
    parameters = (await body(call(top_k=top_k, top_p=0.9, min_p=0.1)))["sampling_params"]
    assert (parameters["top_k"], parameters["logprobs"]) == (asked, asked)
    assert (parameters["top_p"], parameters["min_p"]) == (0.9, 0.1)


async def test_the_last_tokens_come_with_the_cached_tokens_and_the_versions() -> None:
    spans = [{"version": "3", "start": 0, "end": 1}, {"version": "4", "start": 1, "end": 2}]
    first, held, last = await read(
        call(),
        tokens((4, -1.0)),
        tokens((7, -2.0), finish_reason="stop", stop_reason=7, weight_versions=spans),
        usage(cached=16),
    )
    assert first is not None and (first.token_ids, first.logprobs, first.finish) == ([4], [-1.0], None)
    assert held is None
    assert last is not None and last.finish is not None
    assert (last.token_ids, last.cached_tokens, last.finish.kind) == ([7], 16, "stop")
    assert last.finish.spans == (
        VersionSpan(version=3, start=0, end=1),
        VersionSpan(version=4, start=1, end=2),
    )


async def test_the_tokens_of_a_cut_distribution_are_those_with_a_finite_log_probability() -> None:
    (chunk,) = await read(call(top_k=3), tokens((4, -0.5), tops=[{4: -0.5, 9: -1.0, 2: -9999.0}]))
    assert chunk is not None
    sets = unpack(pack(chunk.kept, 1), np.array([4], dtype=np.int32))
    assert sorted(sets.ids.tolist()) == [4, 9] and not sets.left_out[0]


async def test_forbidden_tokens_are_told_as_left_out() -> None:
    (chunk,) = await read(call(suppress=True), tokens((4, -0.5)))
    assert chunk is not None and chunk.kept[0].left_out


async def test_a_log_probability_that_vllm_could_not_write_is_not_a_number() -> None:
    (chunk,) = await read(call(), tokens((4, -9999.0)))
    assert chunk is not None and math.isnan(chunk.logprobs[0])


async def test_an_aborted_call_keeps_its_tokens() -> None:
    _, last = await read(call(), tokens(finish_reason="abort", weight_versions=[]), usage())
    assert last is not None and last.finish is not None and last.finish.kind == "abort"


@pytest.mark.parametrize(
    ("row", "kind"),
    [
        ({"error": {"message": "too long", "code": 400}}, InvalidRequestError),
        ({"error": {"message": "the engine is dead", "code": 500}}, InfrastructureError),
        (usage(), ValueError),
        (
            {"choices": [{"index": 0, "token_ids": [1, 2], "logprobs": {"content": []}}]},
            ValueError,
        ),
        (tokens((1, -1.0)) | {"choices": [{"index": 0, "token_ids": [1]}]}, ValueError),
        (
            tokens((1, -1.0), finish_reason="stop", weight_versions=[{"version": "default", "start": 0, "end": 1}]),
            ValueError,
        ),
    ],
)
async def test_what_makes_no_sense_is_refused(row: dict[str, Any], kind: type[Exception]) -> None:
    with pytest.raises(kind):
        await read(call(), row)
