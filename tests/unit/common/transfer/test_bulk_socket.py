"""Frames pass a bulk socket unchanged, and no other bytes are taken for frames."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common.errors import InvalidRequestError
from services.common.transfer.bulk import (
    ANSWER_BYTES,
    REQUEST_BYTES,
    TICKET_BYTES,
    BulkRequest,
    Operation,
    decode_answer,
)


@given(
    st.binary(min_size=TICKET_BYTES, max_size=TICKET_BYTES),
    st.sampled_from(Operation),
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**32 - 1),
)
def test_requests_come_back_as_they_were(ticket: bytes, operation: Operation, offset: int, size: int) -> None:
    request = BulkRequest(ticket=ticket, operation=operation, offset=offset, size_bytes=size)
    encoded = request.encode()
    assert len(encoded) == REQUEST_BYTES
    assert BulkRequest.decode(encoded) == request


@given(st.binary(max_size=2 * REQUEST_BYTES).filter(lambda data: len(data) != REQUEST_BYTES))
def test_bytes_of_another_length_are_no_request(data: bytes) -> None:
    with pytest.raises(InvalidRequestError):
        BulkRequest.decode(data)


@given(st.binary(min_size=REQUEST_BYTES, max_size=REQUEST_BYTES))
def test_any_bytes_are_a_request_or_refused(data: bytes) -> None:
    try:
        assert BulkRequest.decode(data).encode() == data
    except InvalidRequestError:
        assert data[TICKET_BYTES] not in set(Operation)


@pytest.mark.parametrize("head", [b"", bytes(ANSWER_BYTES), bytes(ANSWER_BYTES + 1), b"\x03" + bytes(ANSWER_BYTES - 1)])
def test_other_heads_are_refused(head: bytes) -> None:
    with pytest.raises(InvalidRequestError):
        decode_answer(head)
