"""Which of several failures explains the others."""

from __future__ import annotations

import signal
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import DistNetworkError

from services.common.system.child import START_AGAIN
from services.trainer.launch_ranks import _cause
from services.trainer.ranks import PeerLostError, peer_loss


def failed(*exit_codes: int) -> Any:
    failures = {rank: SimpleNamespace(exitcode=code, timestamp=rank) for rank, code in enumerate(exit_codes)}
    return SimpleNamespace(failures=failures)


@pytest.mark.parametrize(
    ("exit_codes", "cause"),
    [
        ((START_AGAIN, -signal.SIGKILL), -signal.SIGKILL),  # rank 0 only heard of it
        ((-signal.SIGTERM, START_AGAIN, 2), 2),  # torchrun ended rank 0, rank 2 refused its recipe
        ((-signal.SIGTERM, START_AGAIN), START_AGAIN),
        ((1, 2), 1),  # the first
    ],
)
def test_the_rank_that_failed_by_itself_explains_the_others(exit_codes: tuple[int, ...], cause: int) -> None:
    assert _cause(failed(*exit_codes)) == cause


def test_the_loss_of_a_peer_is_distinguished_from_other_errors() -> None:
    gloo = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:4242"
    lost = peer_loss(RuntimeError(gloo))
    assert lost is not None and "Connection closed by peer" in lost.message
    assert peer_loss(DistNetworkError("The client socket has timed out")) is not None
    kept = PeerLostError("the ranks of another node were told to leave")
    assert peer_loss(kept) is kept
    assert peer_loss(RuntimeError("CUDA out of memory")) is None
    assert peer_loss(RuntimeError("gloo: unsupported dtype")) is None
