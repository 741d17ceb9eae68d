"""Records of truncated sampling: refused without the sets of kept tokens, and the same after a restart."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from services.common.kept_tokens import KeptRow, kept_rows, left_out_row, pack
from services.common.records import Sampling, TaskGroupOrder, TokenSequence, Trajectory
from services.orchestrator.ingest import PolicyBounds, RecordBounds, RecordRefusedError
from tests.unit.orchestrator.builders import order, sequence, trajectory

BOUNDS = RecordBounds({"model0": PolicyBounds(context_length=64)})
CUT: dict[str, Any] = {"top_p": 0.9, "min_p": 0.05}


def fault_of(record: Trajectory, issued: TaskGroupOrder) -> str:
    try:
        BOUNDS.check(record, issued, lambda policy: 0)
    except RecordRefusedError as error:
        return error.refusal.detail
    return ""


def rows_for(token_ids: np.ndarray) -> list[KeptRow]:
    """Each token and the next one could be drawn."""
    return kept_rows(token_ids[:, None] + 1, np.ones(len(token_ids), np.int64), token_ids.astype(np.int64))


def cut(made: TokenSequence, kept: bytes | None = None, temperature: float | None = None) -> TokenSequence:
    prompt, said = made.segments
    told = pack(rows_for(said.token_ids), said.num_tokens) if kept is None else kept
    return replace(made, segments=(prompt, replace(said, kept=told, temperature=temperature)))


@pytest.mark.parametrize(
    ("kept", "temperature", "fault"),
    [
        (b"", None, "the tokens that top_k, top_p and min_p kept are missing"),
        (b"\x00", None, "cannot be unpacked"),
        (pack([left_out_row([2])], 4), None, "token 2 (number 2)"),
        (pack([left_out_row([9])], 3), None, "3 tokens in 1 rows are with 4"),
        (None, 0.0, "temperature is 0.0"),
        (None, float("nan"), "temperature is nan"),
        (None, 0.7, ""),
    ],
)
def test_a_segment_without_the_distribution_that_it_was_drawn_from_is_refused(
    kept: bytes | None, temperature: float | None, fault: str
) -> None:
    if kept == pack([left_out_row([2])], 4):  # of the third token alone, which it then could not be
        kept = pack([left_out_row([9])] * 2 + [left_out_row([2])], 4)
    record = trajectory("g", 0, cut(sequence(), kept, temperature))
    found = fault_of(record, replace(order(), sampling=Sampling(**CUT)))
    assert fault in found and bool(found) == bool(fault)


def test_an_engine_need_not_tell_what_was_kept_of_the_whole_distribution() -> None:
    assert fault_of(trajectory("g", 0, sequence()), order()) == ""
