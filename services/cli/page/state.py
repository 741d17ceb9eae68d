"""The state of a run: from its orchestrator where one answers, else from the last rows of its metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from services.cli.console.units import format_clock
from services.cli.doctor.command import as_object
from services.cli.doctor.diagnosis import diagnose
from services.cli.inspect.pictures.time import newest_shares, segments_of
from services.cli.inspect.rows import Row
from services.cli.inspect.standing import Standing
from services.cli.page.events import open_stalls
from services.common.config.recipe import Recipe
from services.common.telemetry.components import is_records, is_weights
from services.common.telemetry.metrics import RowKind, StepKey, ThroughputKey, TrainerKey

Json = dict[str, Any]


def state_of(standing: Standing, rows: Sequence[Row], live: Json | None, recipe: Recipe) -> Json:
    """Rollouts in flight, waits between components, evaluations, and the doctor's verdict."""
    shares: Mapping[str, Mapping[str, float]] = newest_shares(rows)
    if live is not None and live["shares"]:
        shares = {name: of for name, of in live["shares"].items() if not is_records(name) and not is_weights(name)}
    return {
        "state": live["state"] if live is not None else standing.state,
        "held_by": standing.held_by,
        "directory": str(standing.run_dir),
        "stands": standing.state,
        "newest_at": rows[-1]["time"] if rows else None,
        "checkpoints": standing.checkpoints,
        "now": live if live is not None else _last(standing, rows),
        "is_live": live is not None,
        "recipe": {
            "name": recipe.name,
            "description": recipe.description,
            "steps": recipe.run.steps,
            "seed": recipe.run.seed,
        },
        "time": [
            {
                "component": component,
                "segments": [
                    {"kind": kind, "activity": activity, "share": share}
                    for kind, activity, share in segments_of(shares[component])
                ],
            }
            for component in sorted(shares)
        ],
        "evaluations": [_evaluation(row) for row in rows if row["kind"] == RowKind.EVALUATION],
        "verdict": as_object(diagnose(rows, recipe)) if rows else None,
    }


def _last(standing: Standing, rows: Sequence[Row]) -> Json:
    """The same keys as ``live.as_json``, as far as the files tell."""
    newest: dict[str, Row] = {}
    throughput: Row = {}
    threshold = ""
    for row in rows:
        if row["kind"] == RowKind.TRAINING_STEP:
            newest[row["policy"]] = row
        elif row["kind"] == RowKind.THROUGHPUT:
            throughput = row
        elif row["kind"] == RowKind.THRESHOLD:
            threshold = f"threshold reached after training step {row['step']}: {row['wanted']}"
    return {
        "time": _elapsed(rows),
        "tokens_per_s": throughput.get(ThroughputKey.TOKENS_PER_S),
        "policies": [
            {
                "policy": policy,
                "step": row["step"],
                "steps": standing.wanted_steps,
                "staleness_max": row.get(StepKey.STALENESS_MAX),
                "reward": row.get(StepKey.ROLLOUT_REWARD_MEAN),
                "loss": row.get(TrainerKey.LOSS.in_row),
            }
            for policy, row in newest.items()
        ],
        "replicas": [],
        "rollouts": sum(
            row.get(StepKey.ROLLOUTS_FINISHED) or 0 for row in rows if row["kind"] == RowKind.TRAINING_STEP
        ),
        "trained_tokens": sum(
            row.get(StepKey.NUM_TRAINED_TOKENS) or 0 for row in rows if row["kind"] == RowKind.TRAINING_STEP
        ),
        "waits": throughput.get("waits", []),
        "stalls": open_stalls(rows),
        "warnings": [],
        "threshold": threshold,
    }


def _elapsed(rows: Sequence[Row]) -> str:
    return f"{format_clock(rows[-1]['time'] - rows[0]['time'])} of records" if rows else ""


def _evaluation(row: Row) -> Json:
    return {
        "name": row["name"],
        "versions": row["versions"],
        "mean_reward": row["mean_reward"],
        "num_trajectories": row.get("num_trajectories"),
        "num_failed": row.get("num_failed"),
        "difference": row.get("difference"),
        "datasets": [
            {"name": d.get("name"), "mean_reward": d.get("mean_reward"), "pass_at": d.get("pass_at", {})}
            for d in row["datasets"]
        ],
    }
