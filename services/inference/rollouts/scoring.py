"""Scores finished rollouts with teachers: log-probabilities of the tokens that the students sampled.

A rollout is scored before its record leaves the replica: a teacher that does not answer fails the attempt like other
infrastructure, and the rollout is played again. A token is scored at the temperature of its draw, so that teacher and
student compare exactly. A teacher has one version. Independent of rewards, records and losses.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from services.common.errors import ConfigError
from services.common.records.phases import PhaseKind
from services.common.records.types import Sampling, Segment, Sequence
from services.common.telemetry.accounts import TimeAccount
from services.common.telemetry.activities import ActivityName
from services.common.telemetry.components import engine
from services.inference.engine.base import ScoreRequest
from services.inference.rollouts.policies import ServedPolicy
from services.inference.rollouts.timing import RolloutClock


class Teachers:
    """The teacher of each policy that has one, among the policies of this replica."""

    def __init__(self, policies: Mapping[str, ServedPolicy], teachers: Mapping[str, str], account: TimeAccount) -> None:
        """``teachers``: student -> teacher. Students that this replica does not serve are left out."""
        self._teachers = {student: policies[name] for student, name in teachers.items() if student in policies}
        self._account = account

    @property
    def names(self) -> frozenset[str]:
        """Names of the teachers, which play only in orders that name them."""
        return frozenset(teacher.name for teacher in self._teachers.values())

    async def scored(
        self, sequences: tuple[Sequence, ...], sampling: Sampling, clock: RolloutClock, request_prefix: str
    ) -> tuple[Sequence, ...]:
        """The sequences, each with the log-probabilities of its policy's teacher; ``sampling`` is that of the order.

        Raises:
            ConfigError: tokens were drawn from a part of the vocabulary, over which no engine scores.
            InfrastructureError: the teacher's engine failed.
        """
        found = []
        for number, sequence in enumerate(sequences):
            teacher = self._teachers.get(sequence.policy)
            if teacher is not None and sequence.num_trained_tokens:
                request = score_request(sequence, sampling.temperature, f"{request_prefix}/score/{number}")
                with (
                    self._account.during(ActivityName.SCORING, on=engine(teacher.name)),
                    clock.phase(PhaseKind.SCORE, teacher.name) as phase,
                ):
                    logprobs = await teacher.engine.score(request)
                    phase.detail = f"{len(logprobs)} tokens of {sequence.policy}"
                sequence = _with_scores(sequence, logprobs)
            found.append(sequence)
        return tuple(found)


def score_request(sequence: Sequence, temperature: float, request_id: str) -> ScoreRequest:
    """A request to score every policy token of the sequence; ``temperature`` applies where a segment names none."""
    segments = sequence.segments
    if any(segment.kept for segment in segments):
        raise ConfigError(
            f"tokens of {sequence.policy} were drawn from a part of the vocabulary, and its teacher scores over the whole: "
            "sample with top_p 1, top_k 0, min_p 0 and min_new_tokens 0 (workflow.settings.client_sampling false), or name "
            "the teacher's model in algorithm.distillation.teacher_model"
        )
    lengths = [segment.num_tokens for segment in segments]
    is_policy = np.repeat([segment.is_policy for segment in segments], lengths)
    own = [temperature if segment.temperature is None else segment.temperature for segment in segments]
    return ScoreRequest(
        request_id=request_id,
        token_ids=sequence.token_ids,
        positions=np.flatnonzero(is_policy).astype(np.int64),
        temperatures=np.repeat(np.asarray(own, dtype=np.float32), lengths)[is_policy],
    )


def _with_scores(sequence: Sequence, logprobs: np.ndarray[tuple[int], np.dtype[np.float32]]) -> Sequence:
    segments: list[Segment] = []
    start = 0
    for segment in sequence.segments:
        if segment.is_policy:
            end = start + segment.num_tokens
            segment = replace(segment, teacher_logprobs=logprobs[start:end])
            start = end
        segments.append(segment)
    return replace(sequence, segments=tuple(segments))
