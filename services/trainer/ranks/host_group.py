"""Exchanges short texts between ranks, over gloo on the hosts, independent of the backend of the gradients.

For an action of one rank (such as reserving a file) with a result for all ranks. Each exchange has a name and its own
deadline, shorter than that of the training's collectives, in which ranks wait for batches.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import orjson
import torch
import torch.distributed as dist

from services.common.errors import DeadlineError, InfrastructureError, MillraceError
from services.trainer.ranks.peer_loss import PeerLostError
from services.trainer.ranks.sharding import Ranks

TIMEOUT_S = 300.0


class HostGroup:
    """The group of all ranks over gloo. The constructor and every method are collectives."""

    def __init__(self, ranks: Ranks, timeout_s: float = TIMEOUT_S) -> None:
        self._ranks = ranks
        self._timeout_s = timeout_s
        self._group = None
        if ranks.world_size > 1:
            self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))

    def gather(self, text: str, wait: str) -> list[str]:
        """Every rank's text, in rank order.

        Raises:
            DeadlineError: a rank did not join the exchange named ``wait``.
            PeerLostError: a rank died.
        """
        if self._group is None:
            return [text]
        encoded = torch.frombuffer(bytearray(text.encode()) or bytearray(1), dtype=torch.uint8)
        try:
            sizes = self._all_gather(torch.tensor([len(text.encode())]))
            longest = max(1, *(int(size) for size in sizes))
            padded = torch.zeros(longest, dtype=torch.uint8)
            padded[: len(encoded)] = encoded
            rows = self._all_gather(padded)
        except RuntimeError as error:  # gloo raises only this type, for both errors
            if "timed out" in str(error).lower():
                raise DeadlineError(
                    f"{wait} took longer than {self._timeout_s:g} s: not all of {self._ranks.world_size} ranks joined",
                    wait=wait,
                ) from error
            raise PeerLostError(f"{wait}: a rank was lost: {error}") from error
        return [row[: int(size)].numpy().tobytes().decode() for row, size in zip(rows, sizes, strict=True)]

    def agree(self, wait: str, work: Callable[[], str], error: type[MillraceError] = InfrastructureError) -> list[str]:
        """Run ``work`` on every rank and gather the results, as a barrier.

        Raises ``error``, with the same message on every rank, when the work raises ``MillraceError`` or ``OSError`` on one
        of them. Any other exception is a bug: the exception ends this rank, and so the others.
        """
        if self._group is None:
            return [work()]
        failure: MillraceError | OSError | None = None
        own = {}
        try:
            own["result"] = work()
        except (MillraceError, OSError) as caught:
            failure = caught
            own["failed"] = caught.message if isinstance(caught, MillraceError) else str(caught)
        answers = [orjson.loads(text) for text in self.gather(orjson.dumps(own).decode(), wait)]
        failed = [f"rank {rank}: {answer['failed']}" for rank, answer in enumerate(answers) if "failed" in answer]
        if failed:
            raise error(f"{wait}: {'; '.join(failed)}") from failure
        return [str(answer["result"]) for answer in answers]

    def _all_gather(self, values: torch.Tensor) -> list[torch.Tensor]:
        rows = [torch.empty_like(values) for _ in range(self._ranks.world_size)]
        dist.all_gather(rows, values, group=self._group)
        return rows
