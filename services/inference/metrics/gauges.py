"""Gauges of a replica's process, for its status and its report, and their names as metrics."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from services.common.prometheus import Metric
from services.inference.loading import LoadedPolicy
from services.inference.rollouts.player import RolloutPlayer
from services.inference.rpc.trajectory_sender import TrajectorySender

METRICS = (
    Metric("rollmill_tokens_generated_total", "counter", "Tokens sampled since the process started.", "tokens_generated/{policy}"),
    Metric("rollmill_engine_requests_running", "gauge", "Requests that an engine generates now.", "requests_running/{policy}"),
    Metric("rollmill_engine_requests_waiting", "gauge", "Requests that wait in an engine.", "requests_waiting/{policy}"),
    Metric("rollmill_engine_kv_blocks", "gauge", "Blocks of a paged KV cache that requests can hold.", "kv_blocks/{policy}"),
    Metric("rollmill_engine_kv_blocks_used", "gauge", "Blocks held by running requests and by cached prefixes.", "kv_used/{policy}"),
    Metric("rollmill_engine_kv_blocks_shared", "gauge", "Blocks held by several sequences at once.", "kv_shared/{policy}"),
    Metric("rollmill_engine_kv_evicted_total", "counter", "Cached prefixes given up for their memory.", "kv_evicted/{policy}"),
    Metric("rollmill_engine_kv_parked_total", "counter", "Running requests that gave up their KV for memory and computed it again.", "kv_parked/{policy}"),
    Metric("rollmill_slots", "gauge", "Rollouts that this replica plays at once.", "slots"),
    Metric("rollmill_free_slots", "gauge", "Slots without a rollout.", "free_slots"),
    Metric("rollmill_rollouts_running", "gauge", "Rollouts played now, or waiting for a slot.", "running_rollouts"),
    Metric("rollmill_unacknowledged_records", "gauge", "Records that are not known to be durable yet.", "unacknowledged_records"),
    Metric("rollmill_trajectories_total", "counter", "Rollouts that ended in a trajectory.", "trajectories"),
    Metric("rollmill_failed_rollouts_total", "counter", "Rollouts that ended in a failure.", "failures"),
    Metric("rollmill_rollout_retries_total", "counter", "Rollouts played again after an infrastructure failure.", "retries"),
    Metric("rollmill_cancelled_rollouts_total", "counter", "Rollouts ended from outside.", "cancelled"),
    Metric("rollmill_record_streams_total", "counter", "Streams opened for trajectories; more than one when they broke.", "record_streams"),
    Metric("rollmill_records_acknowledged_total", "counter", "Acknowledgements by outcome.", "acknowledged/{outcome}"),
    Metric("rollmill_records_refused_here_total", "counter", "Records of this replica that the orchestrator did not take, by reason.", "refused/{reason}"),
    Metric("rollmill_engine_weight_version", "gauge", "The version in an engine.", "version_{policy}"),
    Metric("rollmill_weight_fetch_failures_total", "counter", "Versions that could not be taken at the first attempt.", "weights/{policy}/weights_failures"),
    Metric("rollmill_weight_transfer_bytes", "gauge", "Bytes of the newest version's transfer.", "weights/{policy}/weights_bytes"),
    Metric("rollmill_weight_transfer_bits_per_change", "gauge", "Bits per changed element of the newest transfer.", "weights/{policy}/weights_bits_per_change"),
    Metric("rollmill_weight_fetch_seconds", "gauge", "Seconds that fetching the newest version took.", "weights/{policy}/weights_fetch_s"),
    Metric("rollmill_weight_swap_pause_seconds", "gauge", "Seconds that decoding stood still for the newest version.", "weights/{policy}/swap_pause_s"),
    Metric("rollmill_mirror_weight_version", "gauge", "The version in the host mirror.", "weights/{policy}/weights_version"),
)  # fmt: skip


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
