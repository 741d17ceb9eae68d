"""One rollout as a person reads it: turns with roles, and of each token that the policy wrote its text, its log-probability,
the weight version that sampled it, and its advantage.

    {"sequences": [{"policy": ..., "turns": [{"role": "user", "text": ...}, {"role": "policy", "tokens": [...], ...}]}]}

The trainer computes advantages and records none; those that need the reward and the group alone are computed here by its
own function. Others are named instead: they need values of a critic, of a teacher, or the rewards of a whole batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from typing import Any

import orjson

from services.cli.inspect.trajectories import expected
from services.cli.inspect.turns import ENVIRONMENT, POLICY, PROMPT, Marks, read_turns
from services.common.config.training.algorithm import AlgorithmConfig
from services.common.records.types import Logprobs, Segment, Sequence, StopReason, TrainingSequence, Trajectory
from services.orchestrator.journal.records import BatchEntry, BatchRecord
from services.orchestrator.state.groups import split_sequence_id

_REPLACEMENT = "�"
_LONGEST = 8  # tokens of one character; more are not one
_ANCHORS = range(512)


class Pieces:
    """Texts of token ids by one tokenizer, so that the tokens of a turn can be told apart. Without one, ids are shown as
    numbers.

    A byte-level tokenizer may cut one character into several tokens, and then each alone decodes to the replacement
    sign: such tokens are decoded together, and the first of them has the text. A tokenizer may also drop the space
    before the first word of a text: so a token is decoded behind another one, whose text is then taken off.
    """

    def __init__(self, tokenizer: Any | None) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, str] = {}
        self._anchor = next((number for number in _ANCHORS if self._is_anchor(number)), None) if tokenizer else None

    def _is_anchor(self, number: int) -> bool:
        assert self._tokenizer is not None
        text = self._tokenizer.decode([number])
        return len(text) == 1 and text.isascii() and text.isalnum()

    @property
    def are_text(self) -> bool:
        return self._tokenizer is not None

    def of(self, ids: list[int]) -> list[str]:
        """One text for each token, whose sum is the text of all; empty for the later tokens of one character. [num_tokens]"""
        if self._tokenizer is None:
            return [f"[{token}] " for token in ids]
        texts = [self._alone(token) for token in ids]
        at = 0
        while at < len(texts):
            if _REPLACEMENT not in texts[at]:
                at += 1
                continue
            end, whole = self._character(ids, at)
            texts[at:end] = [whole, *[""] * (end - at - 1)]
            at = end
        return texts

    def _character(self, ids: list[int], begin: int) -> tuple[int, str]:
        """Where the tokens of a character end, and the text; of bytes that are no character, one token."""
        for end in range(begin + 2, min(begin + _LONGEST, len(ids)) + 1):
            whole = self._decoded(ids[begin:end])
            if _REPLACEMENT not in whole:
                return end, whole
        return begin + 1, self._alone(ids[begin])

    def _alone(self, token: int) -> str:
        found = self._known.get(token)
        if found is None:
            found = self._known[token] = self._decoded([token])
        return found

    def _decoded(self, ids: list[int]) -> str:
        assert self._tokenizer is not None
        if self._anchor is None:
            return str(self._tokenizer.decode(list(ids)))
        return str(self._tokenizer.decode([self._anchor, *ids]))[1:]


Json = dict[str, Any]

TASK_CHARACTERS = 20_000  # of a task's row, which may hold all tests of a program


def conversation(
    trajectory: Trajectory, issue: Json, texts: Mapping[str, tuple[Pieces, Marks]], uses: Mapping[int, Json]
) -> Json:
    """``issue``: the journal's line of the task group, or empty. ``texts`` by policy; ``uses`` by position of the sequence: its use in a batch (``advantages.uses``)."""
    return {
        "task_group": trajectory.task_group_id,
        "slot": trajectory.index,
        "reward": trajectory.reward,
        "replica": trajectory.replica_id,
        "started_at": trajectory.started_at,
        "finished_at": trajectory.finished_at,
        "metrics": trajectory.metrics,
        "expected": expected(issue),
        "task_row": _task_row(issue),
        "sequences": [
            {
                "policy": sequence.policy,
                "role": sequence.role,
                "attempt": sequence.attempt,
                "parent": sequence.parent,
                "origin": sequence.origin.value,
                "reward": sequence.reward,
                "stop": sequence.stop_reason.value,
                "metrics": sequence.metrics,
                "use": uses.get(position),
                "are_text": texts[sequence.policy][0].are_text,
                "turns": list(_turns(sequence.segments, *texts[sequence.policy])),
            }
            for position, sequence in enumerate(trajectory.sequences)
        ],
    }


def _task_row(issue: Json) -> str:
    try:
        row = orjson.loads(issue.get("data_json", "{}"))
    except orjson.JSONDecodeError:
        return str(issue.get("data_json", ""))[:TASK_CHARACTERS]
    return orjson.dumps(row, option=orjson.OPT_INDENT_2).decode()[:TASK_CHARACTERS] if row else ""


def _turns(segments: Iterable[Segment], pieces: Pieces, marks: Marks) -> Iterator[Json]:
    parts = groupby(segments, key=lambda segment: segment.is_policy)
    for number, (by_policy, found) in enumerate(parts):
        if by_policy:
            yield _written(list(found), pieces)
            continue
        text = "".join("".join(pieces.of(segment.token_ids.tolist())) for segment in found)
        for turn in read_turns(text, marks, PROMPT if number == 0 else ENVIRONMENT):
            if turn.text:
                yield {"role": turn.role, "text": turn.text}


def _written(segments: list[Segment], pieces: Pieces) -> Json:
    """A turn of the policy. ``spans``: how many tokens a weight version sampled, in order."""
    ids: list[list[int]] = [segment.token_ids.tolist() for segment in segments]
    logprobs = [_rounded(segment.logprobs) for segment in segments]
    return {
        "role": POLICY,
        "tokens": pieces.of([token for part in ids for token in part]),
        "ids": [token for part in ids for token in part],
        "logprobs": [value for part in logprobs for value in part],
        "teacher_logprobs": [value for segment in segments for value in _rounded(segment.teacher_logprobs)],
        "spans": [
            {
                "tokens": len(part),
                "version": segment.weight_version,
                "temperature": segment.temperature,
                "mixed_cache": segment.mixed_cache,
            }
            for part, segment in zip(ids, segments, strict=True)
        ],
    }


def _rounded(values: Logprobs) -> list[float]:
    return [round(value, 5) for value in values.tolist()]


def uses(
    trajectory: Trajectory, batches: Iterable[BatchRecord], algorithms: Mapping[str, AlgorithmConfig]
) -> dict[int, Json]:
    """By position of the sequence in the trajectory: training step, staleness, statistics of the group, and the
    ``advantage``, or ``why`` it is not known."""
    found: dict[int, Json] = {}
    for batch in batches:
        for entry in batch.entries:
            group, slot, position = split_sequence_id(entry.sequence_id)
            if (group, slot) != (trajectory.task_group_id, trajectory.index) or position in found:
                continue
            of_policy = algorithms.get(batch.policy)
            reward = entry.reward if entry.reward is not None else trajectory.sequences[position].reward
            advantage, why = (None, "its policy is not in the recipe")
            if of_policy is not None:
                advantage, why = _advantage(entry, reward, of_policy)
            found[position] = {
                "step": batch.training_step,
                "minibatch": entry.minibatch,
                "staleness": entry.staleness,
                "trained_reward": reward,
                "group_mean": entry.group_mean,
                "group_std": entry.group_std,
                "group_size": entry.group_size,
                "trained_from": entry.trained_from,
                "advantage": advantage,
                "why": why,
            }
    return found


def _advantage(entry: BatchEntry, reward: float, algorithm: AlgorithmConfig) -> tuple[float | None, str]:
    if algorithm.distillation is not None:
        return None, "the trainer computes it for each token from the teacher's log-probability"
    if algorithm.advantage == "gae":
        return None, "the trainer computes it for each token from the values of the critic"
    if algorithm.deviation == "batch":
        return None, "the trainer divides it by the deviation of its whole batch"
    try:
        from services.trainer.algorithms.advantages.sequences import sequence_advantages
    except ImportError:  # a machine that only reads runs
        return None, "the trainer's packages are not installed here"
    sequence = Sequence(policy="", role="", attempt=0, segments=(), reward=reward, stop_reason=StopReason.STOP)
    stamped = TrainingSequence(
        sequence_id=entry.sequence_id, sequence=sequence, group_mean=entry.group_mean, group_std=entry.group_std,
        group_size=entry.group_size, staleness=0, minibatch=0, position=0,
    )  # fmt: skip
    note = "before the normalisation over the batch" if algorithm.batch_normalize_advantages else ""
    if algorithm.gamma != 1.0 or algorithm.kl_reward_coefficient:
        note = "of the last token: the trainer discounts it, or takes the KL off, for each token"
    return float(sequence_advantages([stamped], algorithm)[0]), note
