"""Which records travel in one message: all of them, in order, within the bound wherever one record alone is."""

from __future__ import annotations

from collections import deque

from hypothesis import given
from hypothesis import strategies as st

from services.common.pb import pool_pb2, trajectory_pb2
from services.inference.records_out import take_message

MOST_BYTES = 1000


def record(index: int, num_bytes: int) -> pool_pb2.NumberedRecord:
    failure = trajectory_pb2.RolloutFailure(task_group_id="g", index=index, detail="x" * num_bytes)
    return pool_pb2.NumberedRecord(record_number=index + 1, failure=failure)


@given(st.lists(st.integers(0, 1500), min_size=1, max_size=40))
def test_messages_hold_every_record_once_in_order_and_keep_the_bound(sizes: list[int]) -> None:
    waiting = deque(record(index, size) for index, size in enumerate(sizes))
    messages = []
    while waiting:
        messages.append(take_message(waiting, MOST_BYTES))
    assert [r.failure.index for message in messages for r in message] == list(range(len(sizes)))
    for message, following in zip(messages, [*messages[1:], []], strict=True):
        size = sum(r.ByteSize() for r in message)
        assert len(message) == 1 or size <= MOST_BYTES
        assert not following or size + following[0].ByteSize() > MOST_BYTES, "the next record would have fitted"
