"""The scalars of a run by name, step and unit, as every tracker shows them: a function of the rows of its metrics.

A scalar belongs to a group: a policy (metrics of its training steps), ``evaluation``, ``throughput``, or
``weights/<policy>/<replica>``. Its whole name is ``<group>/<name>``. docs/trackers.md has the table.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from services.common.records.types import TRANSFER_STAGES
from services.common.telemetry.metrics import RowKind, ThroughputKey
from services.orchestrator.dispatch.evaluation import kind_of

Row = Mapping[str, Any]

EVALUATION_GROUP, THROUGHPUT_GROUP, WEIGHTS_GROUP = "evaluation", "throughput", "weights"

UNITS: tuple[tuple[str, str], ...] = (
    (r".*(tokens_per_s|tokens_per_second)", "{token}/s"),
    (r".*(_s|seconds)", "s"),
    (r".*_bytes", "By"),
    (r".*_gib", "GiBy"),
    (r".*bits_per_change", "bit"),
    (r".*tflops", "TFLOP/s"),
    (r".*(entropy|mismatch\w*_abs|_kl|kl_reference)", "nat"),
    (r".*(share|_min|mfu|pass@\d+|explained_variance)", "1"),
    (r".*(response_tokens_mean|num_\w*tokens|tokens_masked|tokens_expired)", "{token}"),
    (r".*(num_sequences|num_replayed|sequences_\w+)", "{sequence}"),
    (r"(source/.*/)?(rollouts_finished|failures|timeouts|slots_cancelled|running)", "{rollout}"),
    (r".*staleness\w*", "{version}"),
)
"""Pattern of a name without its group, and its unit in UCUM as OpenTelemetry writes it; the first that matches. Any other
is a number without a unit (``1``): rewards, losses, gradient norms, counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scalars:
    """Numbers of one group at one step.

    Example: ``Scalars(group="model0", step=7, time_s=1767225600.0, values={"trainer/loss": -0.02})``.
    """

    group: str
    step: int
    """A training step; of weights the version, of throughput the newest step of any policy."""
    time_s: float
    """Since the epoch."""
    values: Mapping[str, float]
    """By name without the group; finite."""

    @property
    def tagged(self) -> dict[str, float]:
        """By whole name."""
        return {f"{self.group}/{name}": value for name, value in self.values.items()}


def unit_of(name: str) -> str:
    """The unit of a scalar by its name without the group.

    >>> unit_of("compute_s"), unit_of("trainer/tokens_per_second"), unit_of("rollout_reward_mean")
    ('s', '{token}/s', '1')
    """
    return next((unit for pattern, unit in UNITS if re.fullmatch(pattern, name)), "1")


def scalars_of(row: Row) -> Scalars | None:
    """The scalars of a row; None for a row without any: stalls, accounts, a failed transfer, the summary."""
    makers = {
        RowKind.TRAINING_STEP: _training_step,
        RowKind.THROUGHPUT: _throughput,
        RowKind.WEIGHT_TRANSFER: _weight_transfer,
        RowKind.EVALUATION: _evaluation,
    }
    make = makers.get(row["kind"])
    if make is None or (found := make(row)) is None:
        return None
    group, step, values = found
    finite = {name: float(value) for name, value in values.items() if _is_number(value)}
    return Scalars(group=group, step=step, time_s=row["time"], values=finite)


_Found = tuple[str, int, Mapping[str, Any]]
_NO_METRIC = ("time", "kind", "policy", "step")


def _training_step(row: Row) -> _Found:
    return row["policy"], row["step"], {name: value for name, value in row.items() if name not in _NO_METRIC}


def _throughput(row: Row) -> _Found:
    return THROUGHPUT_GROUP, row.get("step", 0), {key: row.get(key) for key in ThroughputKey}


def _weight_transfer(row: Row) -> _Found | None:
    if row["error"]:
        return None
    changes, size = row["num_changes"], row["payload_size_bytes"]
    values = {stage: row[stage] for stage in TRANSFER_STAGES}
    values |= {"payload_bytes": size, "bits_per_change": 8 * size / changes if changes else 0.0}
    return f"{WEIGHTS_GROUP}/{row['policy']}/{row['replica']}", row["version"], values


def _evaluation(row: Row) -> _Found:
    kind = kind_of(row["name"])  # one curve for each way of sampling
    values = {kind: row["mean_reward"]}
    for found in row["datasets"]:
        values[f"{kind}/{found['name']}"] = found["mean_reward"]["value"]
        values |= {f"{kind}/{found['name']}/pass@{k}": share["value"] for k, share in found["pass_at"].items()}
    values |= {f"{kind}/{role}": reward for role, reward in row["roles"].items() if len(row["roles"]) > 1}
    return EVALUATION_GROUP, max(row["newest_versions"].values(), default=0), values


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
