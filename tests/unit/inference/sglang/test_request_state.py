"""State of a request: one budget, segments by version, stop tokens forbidden as long as they must be."""

from __future__ import annotations

from typing import Any

import pytest

from services.common.errors import InfrastructureError
from services.common.records import Sampling
from services.inference.engine.base import FinishReason, GenerationRequest
from services.inference.engine.served.client import VersionSpan
from services.inference.engine.served.engine import CallOutput, RequestState


def state(*, room: int = 1000, stop: tuple[int, ...] = (9,), **sampling: Any) -> RequestState:
    request = GenerationRequest(
        request_id="r", prompt_ids=(1, 2, 3), sampling=Sampling(**sampling), stop_token_ids=stop
    )
    return RequestState(request, room)


def output(*tokens: int) -> CallOutput:
    return CallOutput(tokens=list(tokens), logprobs=[-float(token) for token in tokens])


def spans(*bounds: tuple[int, int, int]) -> tuple[VersionSpan, ...]:
    return tuple(VersionSpan(version=version, start=start, end=end) for version, start, end in bounds)


def test_a_leg_cut_short_keeps_the_spans_of_what_is_left() -> None:
    it, cut = state(max_new_tokens=50), output(4, 5, 6, 7)
    cut.cut = 3
    cut.cut_off()
    it.take(cut, spans((0, 0, 2), (1, 2, 9)), mixed_from=None)
    assert [(s.weight_version, s.num_tokens) for s in it.generation(FinishReason.STOP).segments] == [(0, 2), (1, 1)]


@pytest.mark.parametrize("told", [(), ((0, 0, 1),), ((0, 0, 1), (1, 2, 3)), ((0, 1, 3),)])
def test_tokens_without_a_version_are_refused(told: tuple[tuple[int, int, int], ...]) -> None:
    it = state(max_new_tokens=50)
    with pytest.raises(InfrastructureError, match="which weights"):
        it.take(output(4, 5, 6), spans(*told), mixed_from=None)
    assert it.tokens == []


def test_a_request_has_ended_with_its_stop_token_whatever_the_server_said() -> None:
    it = state(max_new_tokens=50)
    it.take(output(4, 9), spans((0, 0, 2)), mixed_from=None)
    assert it.ended() is FinishReason.STOP
