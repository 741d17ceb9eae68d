"""Metrics of the run: rows in ``metrics/orchestrator.jsonl``, scalars for TensorBoard, and ``summary.json`` at the end.

Everything here can be made again from the journal or is for people to look at: nothing reads it back. Without free disk
rows are dropped, counted and said once; the run does not end for them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import orjson
import structlog

from services.common.metrics import MetricsWriter
from services.common.types import WeightTransfer
from services.orchestrator.evaluation import kind_of
from services.orchestrator.journal.records import EvaluationResult
from services.orchestrator.tensorboard import EventFile

log = structlog.get_logger()


def evaluation_values(result: EvaluationResult, items: bool = False) -> dict[str, Any]:
    """What an evaluation says, as plain JSON without its name; with ``items`` also the reward of each."""
    values = asdict(result)
    del values["name"]
    for found in values["datasets"]:
        found["pass_at"] = {str(k): share for k, share in found["pass_at"]}
        if not items:
            del found["item_rewards"]
    return values


class RunMetrics:
    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._rows = MetricsWriter(run_dir / "metrics" / "orchestrator.jsonl")
        self.num_dropped = 0
        self._board = EventFile(run_dir / "tensorboard")

    def _row(self, kind: str, **values: Any) -> None:
        try:
            self._rows.write(kind, **values)
        except OSError as error:
            if not self.num_dropped:
                log.error("metrics.dropped", error=str(error))
            self.num_dropped += 1

    def training_step(self, policy: str, step: int, values: Mapping[str, float]) -> None:
        self._row("training_step", policy=policy, step=step, **values)
        self._scalars(policy, values, step)

    def throughput(self, step: int, waits: list[str], values: Mapping[str, float]) -> None:
        self._row("throughput", **values, waits=waits)
        self._scalars("throughput", values, step)

    def weight_transfer(self, replica_id: str, transfer: WeightTransfer) -> None:
        self._row("weight_transfer", replica=replica_id, **asdict(transfer))
        if transfer.error:
            return
        stages = ("encode_s", "fetch_s", "verify_s", "write_s", "pause_s")
        values = {stage: getattr(transfer, stage) for stage in stages}
        values |= {"payload_bytes": transfer.payload_size_bytes, "bits_per_change": transfer.bits_per_change}
        self._scalars(f"weights/{transfer.policy}/{replica_id}", values, transfer.version)

    def stall(self, moment: str, component: str, cause: str, detail: str, seconds: float) -> None:
        """``moment`` is begin or end; ``seconds`` since it stands still."""
        self._row("stall", moment=moment, component=component, cause=cause, detail=detail, seconds=seconds)

    def accounts(self, shares: Mapping[str, Mapping[str, float]], waits: Mapping[str, Mapping[str, float]]) -> None:
        """Where everybody's time went since its start, and who waited for whom."""
        self._row("accounts", shares=shares, waits=waits)

    def evaluation(self, result: EvaluationResult) -> None:
        self._row(
            "evaluation",
            name=result.name,
            **evaluation_values(result, items=True),
        )
        step = max(result.newest_versions.values(), default=0)
        kind = kind_of(result.name)  # one curve for each way of sampling
        values = {kind: result.mean_reward}
        for found in result.datasets:
            values[f"{kind}/{found.name}"] = found.mean_reward.value
            values |= {f"{kind}/{found.name}/pass@{k}": share.value for k, share in found.pass_at}
        values |= {f"{kind}/{role}": reward for role, reward in result.roles.items() if len(result.roles) > 1}
        self._scalars("evaluation", values, step)

    def summary(self, summary: Mapping[str, Any]) -> None:
        """Written again by a restart when it is not there."""
        self._row("summary", **summary)
        partial = self._run_dir / "summary.json.partial"
        try:
            partial.write_bytes(orjson.dumps(summary, option=orjson.OPT_INDENT_2))
            partial.replace(self._run_dir / "summary.json")
        except OSError as error:
            log.error("summary.not_written", error=str(error))

    def close(self) -> None:
        self._rows.close()
        self._board.close()

    def _scalars(self, group: str, values: Mapping[str, float], step: int) -> None:
        try:
            self._board.scalars(step, {f"{group}/{name}": v for name, v in values.items() if math.isfinite(v)})
        except OSError:
            self.num_dropped += 1
