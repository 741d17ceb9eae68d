"""What ranks tell one another in words: short texts, gathered over gloo on the hosts, whatever moves the gradients.

For what only one rank can do (reserve a file) and all must know the outcome of. Every exchange has a name and a deadline
of its own, shorter than that of the training's collectives, in which ranks wait for batches. Knows nothing about
weights.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import orjson
import torch
import torch.distributed as dist

from services.common.errors import DeadlineError, InfrastructureError, MillraceError
from services.trainer.peers import PeerLostError
from services.trainer.sharding import Ranks

TIMEOUT_S = 300.0


class HostGroup:
    """All ranks, reached through their hosts. Making one is a collective, and so is every method."""

    def __init__(self, ranks: Ranks, timeout_s: float = TIMEOUT_S) -> None:
        self._ranks = ranks
        self._timeout_s = timeout_s
        self._group = None
        if ranks.world_size > 1:
            self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))

    def gather(self, text: str, wait: str) -> list[str]:
        """Every rank's text, in rank order.

        Raises:
            DeadlineError: a rank did not come to the exchange named ``wait``.
            PeerLostError: a rank has died.
        """
        if self._group is None:
            return [text]
        said = torch.frombuffer(bytearray(text.encode()) or bytearray(1), dtype=torch.uint8)
        try:
            sizes = self._all_gather(torch.tensor([len(text.encode())]))
            longest = max(1, *(int(size) for size in sizes))
            padded = torch.zeros(longest, dtype=torch.uint8)
            padded[: len(said)] = said
            rows = self._all_gather(padded)
        except RuntimeError as error:  # gloo's only word, for both
            if "timed out" in str(error).lower():
                raise DeadlineError(
                    f"{wait} took longer than {self._timeout_s:g} s: not all of {self._ranks.world_size} ranks came",
                    wait=wait,
                ) from error
            raise PeerLostError(f"{wait}: a rank has left: {error}") from error
        return [row[: int(size)].numpy().tobytes().decode() for row, size in zip(rows, sizes, strict=True)]

    def agree(self, wait: str, work: Callable[[], str], error: type[MillraceError] = InfrastructureError) -> list[str]:
        """Do something on every rank and gather what it says; nobody goes on before all are done.

        Raises ``error``, with the same words on every rank, when the work failed on any: with a ``MillraceError`` or an
        ``OSError``, that is; anything else is a mistake here, and ends this rank and with it the others.
        """
        if self._group is None:
            return [work()]
        failure: MillraceError | OSError | None = None
        answer = {}
        try:
            answer["said"] = work()
        except (MillraceError, OSError) as caught:
            failure = caught
            answer["failed"] = caught.message if isinstance(caught, MillraceError) else str(caught)
        answers = [orjson.loads(text) for text in self.gather(orjson.dumps(answer).decode(), wait)]
        failed = [f"rank {rank}: {told['failed']}" for rank, told in enumerate(answers) if "failed" in told]
        if failed:
            raise error(f"{wait}: {'; '.join(failed)}") from failure
        return [str(told["said"]) for told in answers]

    def _all_gather(self, values: torch.Tensor) -> list[torch.Tensor]:
        rows = [torch.empty_like(values) for _ in range(self._ranks.world_size)]
        dist.all_gather(rows, values, group=self._group)
        return rows
