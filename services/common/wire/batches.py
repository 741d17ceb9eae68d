"""Conversions between a training batch and the wire: totals of minibatches, training sequences, chunks of a stream."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from services.common.pb import training_pb2
from services.common.records.types import MinibatchTotals, TrainingSequence
from services.common.wire.records import fill_sequence, sequence_from_proto


def totals_to_proto(totals: MinibatchTotals) -> training_pb2.MinibatchTotals:
    return training_pb2.MinibatchTotals(
        num_sequences=totals.num_sequences, num_trained_tokens=totals.num_trained_tokens
    )


def totals_from_proto(proto: training_pb2.MinibatchTotals) -> MinibatchTotals:
    return MinibatchTotals(num_sequences=proto.num_sequences, num_trained_tokens=proto.num_trained_tokens)


def training_sequence_to_proto(item: TrainingSequence) -> training_pb2.TrainingSequence:
    proto = training_pb2.TrainingSequence()
    _fill_training_sequence(proto, item)
    return proto


def _fill_training_sequence(proto: training_pb2.TrainingSequence, item: TrainingSequence) -> None:
    proto.sequence_id = item.sequence_id
    fill_sequence(proto.sequence, item.sequence)
    proto.group_mean = item.group_mean
    proto.group_std = item.group_std
    proto.group_size = item.group_size
    proto.staleness = item.staleness
    proto.minibatch = item.minibatch
    proto.position = item.position
    if item.advantage_scale != 1.0:
        proto.advantage_scale = item.advantage_scale


def batch_chunks(items: Iterable[TrainingSequence], most_bytes: int) -> Iterator[training_pb2.PullBatchResponse]:
    """The sequences in order, as many in a chunk as fit into ``most_bytes``; one that does not is alone in its chunk."""
    response, size = training_pb2.PullBatchResponse(), 0
    for item in items:
        proto = response.chunk.sequences.add()
        _fill_training_sequence(proto, item)
        num_bytes = proto.ByteSize()
        if size and size + num_bytes > most_bytes:
            following = training_pb2.PullBatchResponse()
            following.chunk.sequences.append(proto)
            del response.chunk.sequences[-1]
            yield response
            response, size = following, 0
        size += num_bytes
    if size:
        yield response


def training_sequence_from_proto(proto: training_pb2.TrainingSequence) -> TrainingSequence:
    return TrainingSequence(
        sequence_id=proto.sequence_id,
        sequence=sequence_from_proto(proto.sequence),
        group_mean=proto.group_mean,
        group_std=proto.group_std,
        group_size=proto.group_size,
        staleness=proto.staleness,
        minibatch=proto.minibatch,
        position=proto.position,
        advantage_scale=proto.advantage_scale if proto.HasField("advantage_scale") else 1.0,
    )
