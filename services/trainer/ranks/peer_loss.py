"""Recognises the loss of another rank in errors of collectives.

A rank that loses a peer must start again with all others. The rank logs the loss and exits with
``services.common.system.child.START_AGAIN``, which launchers distinguish from a refusal.
"""

from __future__ import annotations

import torch.distributed as dist

from services.common.errors import InfrastructureError

_GLOO = "gloo"
_GLOO_WORDS = ("closed by peer", "reset by peer", "broken pipe", "timed out", "connection refused", "connect timeout")


class PeerLostError(InfrastructureError):
    """Another rank of this trainer died, or its node cannot be reached."""


def peer_loss(error: BaseException) -> PeerLostError | None:
    """The error as ``PeerLostError``; None for an error with another cause.

    gloo raises a plain ``RuntimeError`` in the running collective; NCCL and the store have their own types.
    """
    if isinstance(error, PeerLostError):
        return error
    text = str(error)
    known = isinstance(error, (dist.DistBackendError, dist.DistNetworkError, dist.DistStoreError))
    if not known and not (_GLOO in text.lower() and any(word in text.lower() for word in _GLOO_WORDS)):
        return None
    first_line = next(iter(text.strip().splitlines()), type(error).__name__)
    return PeerLostError(f"another rank of this trainer is lost, or its node cannot be reached: {first_line}")
