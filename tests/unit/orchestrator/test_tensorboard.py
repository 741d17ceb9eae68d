from __future__ import annotations

import struct
from pathlib import Path

import pytest

from services.orchestrator.metrics import EventFile, crc32c


def test_crc32c_has_its_check_value() -> None:
    assert crc32c(b"123456789") == 0xE3069283


@pytest.mark.slow
def test_tensorboard_reads_the_scalars_back(tmp_path: Path) -> None:
    from tensorboardX.proto import event_pb2  # takes seconds

    board = EventFile(tmp_path)
    board.scalars(300, {"model0/reward_mean": 0.5, "model0/loss": -1.25})
    board.close()
    data = next(tmp_path.iterdir()).read_bytes()
    events = []
    while data:
        (length,) = struct.unpack("<Q", data[:8])
        events.append(event_pb2.Event.FromString(data[12 : 12 + length]))
        data = data[16 + length :]
    assert events[0].file_version == "brain.Event:2"
    assert events[1].step == 300
    assert {v.tag: v.simple_value for v in events[1].summary.value} == {"model0/reward_mean": 0.5, "model0/loss": -1.25}
