"""Any text of a policy can be sent: an error would give the policy another attempt."""

from __future__ import annotations

import pytest

from services.common import errors
from services.common.rpc.client import MESSAGE_BYTES, to_status
from services.inference.gateway import MOST_TEXT_BYTES, _encodable


@pytest.mark.parametrize(
    "text", ["", "plain", "\ud800", "a\udfffb", "é" * MOST_TEXT_BYTES, "x" * (10 << 20), "\0", "😀"]
)
def test_any_text_becomes_one_that_a_message_carries(text: str) -> None:
    sent = _encodable(text)
    assert len(sent.encode()) <= MOST_TEXT_BYTES
    if len(text) < 10 and "\ud800" not in text and "\udfff" not in text:
        assert sent == text


@pytest.mark.parametrize("message", ["\ud800", "\udfff" * 10_000, "x" * 10_000_000])
def test_an_error_that_repeats_an_action_can_be_told(message: str) -> None:
    status = to_status(errors.InfrastructureError(message))
    assert len(status.details.encode()) <= MESSAGE_BYTES + 3
