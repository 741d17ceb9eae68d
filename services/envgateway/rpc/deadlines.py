"""Time that the caller of an RPC will wait."""

from __future__ import annotations

from typing import Any

import grpc

_UNNAMED_S = 600.0  # of callers that name no deadline


def time_left_s(context: grpc.aio.ServicerContext[Any, Any]) -> float:
    """Seconds until the caller's deadline."""
    left_s = context.time_remaining()
    return _UNNAMED_S if left_s is None else float(left_s)
