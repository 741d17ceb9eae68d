"""One rank's share of a batch as it comes over the wire: a header, its sequences, a footer. Each part has a deadline."""

from __future__ import annotations

from typing import Any

import grpc

from services.common.aio import deadline
from services.common.errors import CorruptDataError
from services.common.pb import training_pb2
from services.common.rpc.channel import DEADLINES
from services.common.serde import totals_from_proto, training_sequence_from_proto
from services.common.types import RankBatch

NEXT_PART_S = 30.0  # between two parts of a batch
FIRST_PART_MARGIN_S = 10.0  # the orchestrator answers by itself after its own deadline


async def read_batch(call: Any, policy: str, training_step: int) -> RankBatch:
    """Read a ``PullBatch`` call to its footer.

    Raises:
        CorruptDataError: the stream ended before its footer, or brought another number of sequences than its header says.
        DeadlineError: a part did not come in time.
    """
    first_part_s = (DEADLINES["PullBatch"] or 60.0) + FIRST_PART_MARGIN_S
    header: training_pb2.BatchHeader | None = None
    sequences = []
    while True:
        limit = first_part_s if header is None else NEXT_PART_S
        async with deadline(limit, f"the next part of batch {training_step}"):
            response = await call.read()
        if response is grpc.aio.EOF:
            raise CorruptDataError(f"batch {training_step} ended without a footer")
        part = response.WhichOneof("part")
        if part == "header":
            header = response.header
        elif part == "sequence":
            sequences.append(training_sequence_from_proto(response.sequence))
        elif part == "footer":
            break
    if header is None or len(sequences) != header.num_sequences:
        expected = header.num_sequences if header else "an unknown number of"
        raise CorruptDataError(f"batch {training_step} brought {len(sequences)} of {expected} sequences")
    return RankBatch(
        policy=policy,
        training_step=training_step,
        minibatches=tuple(totals_from_proto(totals) for totals in header.minibatches),
        sequences=tuple(sequences),
    )
