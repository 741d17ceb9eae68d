"""Kinds of phases of a rollout: replicas record them, the orchestrator and ``rollmill trace`` read them."""

from __future__ import annotations

import enum


class PhaseKind(enum.StrEnum):
    GENERATE = "generate"  # a policy's turn
    SCORE = "score"  # a teacher scores the generated tokens
    CREATE_EPISODE = "create_episode"
    STEP = "step"  # of an episode
    CLOSE_EPISODE = "close_episode"
    EXECUTE_CODE = "execute_code"
    COMPUTE_REWARD = "compute_reward"
    JUDGE = "judge"
    RETRY = "retry"  # the pause before another attempt; the detail is the reason of the failure
    NOT_RECORDED = "not_recorded"  # counts the phases beyond the bound
