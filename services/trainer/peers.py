"""What it looks like to a rank when another one has gone, and how it leaves then.

A rank that loses a peer has done nothing wrong and knows nothing better than to start again with the others: it says so
and leaves with ``services.common.process.START_AGAIN``, which launchers tell apart from a refusal.
"""

from __future__ import annotations

import torch.distributed as dist

from services.common.errors import InfrastructureError

_GLOO = "gloo"
_GLOO_WORDS = ("closed by peer", "reset by peer", "broken pipe", "timed out", "connection refused", "connect timeout")


class PeerLostError(InfrastructureError):
    """Another rank of this trainer has died, or its node cannot be reached."""


def peer_loss(error: BaseException) -> PeerLostError | None:
    """The error as the loss of a peer; None when it is something else.

    gloo tells it as a plain ``RuntimeError``, from whatever collective was running; NCCL and the store have types.
    """
    if isinstance(error, PeerLostError):
        return error
    text = str(error)
    known = isinstance(error, (dist.DistBackendError, dist.DistNetworkError, dist.DistStoreError))
    if not known and not (_GLOO in text.lower() and any(word in text.lower() for word in _GLOO_WORDS)):
        return None
    first_line = next(iter(text.strip().splitlines()), type(error).__name__)
    return PeerLostError(f"another rank of this trainer has left, or its node cannot be reached: {first_line}")
