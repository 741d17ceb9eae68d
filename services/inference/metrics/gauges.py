"""Gauges of a replica's process, for its status and its report."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from services.inference.loading import LoadedPolicy
from services.inference.rollouts.player import RolloutPlayer
from services.inference.rpc.trajectory_sender import TrajectorySender


def gauges(player: RolloutPlayer, sender: TrajectorySender, policies: Mapping[str, LoadedPolicy]) -> dict[str, float]:
    """Values by name. A name with a slash belongs to one policy, or to one kind of answer to a record."""
    counters = player.counters
    health = {policy: loaded.served.engine.health() for policy, loaded in policies.items()}
    return {
        "slots": player.num_slots,
        "free_slots": player.num_free_slots,
        "running_rollouts": player.num_running,
        "unacknowledged_records": sender.num_unacknowledged,
        "trajectories": counters.trajectories,
        "failures": counters.failures,
        "retries": player.num_retries,
        "cancelled": counters.cancelled,
        "record_streams": sender.num_streams,
        **{f"acknowledged/{_short(outcome)}": number for outcome, number in sender.outcomes.items()},
        **{f"refused/{reason}": number for reason, number in sender.refused.items()},
        **{f"tokens_generated/{policy}": found.generated_tokens for policy, found in health.items()},
        **{f"requests_running/{policy}": found.running for policy, found in health.items()},
        **{f"requests_waiting/{policy}": found.waiting for policy, found in health.items()},
        **{
            f"kv_{name}/{policy}": float(value)
            for policy, found in health.items()
            if found.kv is not None
            for name, value in dataclasses.asdict(found.kv).items()
        },
        **{f"version_{policy}": loaded.weights.held().number for policy, loaded in policies.items()},
        **{
            f"weights/{policy}/{k}": v
            for policy, loaded in policies.items()
            for k, v in loaded.weights.gauges().items()
        },
    }


def _short(outcome: str) -> str:
    return outcome.removeprefix("RECORD_OUTCOME_").lower()
