"""The state of a run: from its orchestrator where one answers, else from the last rows of its metrics."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from services.cli.console import format_clock
from services.cli.doctor.diagnosis import as_object, diagnose
from services.cli.inspect.pictures.time import newest_shares, segments_of
from services.cli.inspect.run_state import Row
from services.cli.inspect.standing import RUNNING, Standing
from services.cli.page.events import open_stalls
from services.cli.watch.orchestrator_client import check_answers, reach
from services.cli.watch.progress_view import shares_of, state_word, threshold_words, time_words
from services.cli.watch.warnings import journal_and_disk, masked_rollouts, warnings_of
from services.common.config.recipe import Recipe
from services.common.errors import RollmillError
from services.common.pb import run_pb2
from services.common.security import identity
from services.common.telemetry.components import is_records, is_weights
from services.common.telemetry.metrics import RowKind, StepKey, ThroughputKey, TrainerKey
from services.orchestrator.dispatch.evaluation_pass import played_by

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
        "played_by": played_by(row["name"], row["versions"], row.get("newest_versions", {})),
        "mean_reward": row["mean_reward"],
        "num_trajectories": row.get("num_trajectories"),
        "num_failed": row.get("num_failed"),
        "num_opaque": row.get("num_opaque"),
        "difference": row.get("difference"),
        "datasets": [
            {"name": d.get("name"), "mean_reward": d.get("mean_reward"), "pass_at": d.get("pass_at", {})}
            for d in row["datasets"]
        ],
    }


_CALLS = threading.Lock()  # one call at a time uses the identity of this process


class Live:
    """Asks the orchestrator of one run with the keys of that run; ``why`` says why there is no answer."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self.why = ""

    def ask(self, standing: Standing) -> Json | None:
        """None of a run that has ended or whose orchestrator does not answer; a call of at most seconds."""
        if not standing.held_by and standing.state != RUNNING:
            self.why = ""
            return None
        try:
            with _CALLS, identity.used(None):  # of this call: several runs have keys of their own
                client = reach(self._run_dir, None)
                try:
                    progress = check_answers(client, self._run_dir).progress
                finally:
                    client.close()
        except RollmillError as error:
            self.why = error.message
            return None
        self.why = ""
        return as_json(progress)


def as_json(progress: run_pb2.RunProgress) -> Json:
    """The parts of a run's progress that the page shows."""
    return {
        "state": state_word(progress.state),
        "time": time_words(progress),
        "tokens_per_s": progress.tokens_per_s,
        "policies": [_policy(policy) for policy in progress.policies],
        "replicas": [
            {
                "replica": replica.replica_id,
                "running": replica.num_running,
                "slots": replica.num_slots,
                "tokens_per_s": replica.tokens_per_s,
                "versions": dict(replica.versions),
                "lease_left_s": replica.lease_left_s,
                "draining": replica.draining,
            }
            for replica in progress.replicas
        ],
        "waits": list(progress.waits),
        "stalls": [
            {
                "component": stall.component,
                "cause": stall.cause.replace("_", " "),
                "detail": stall.detail,
                "since": stall.since.ToNanoseconds() / 1e9,
                "advice": stall.advice,
                "chain": list(stall.chain),
            }
            for stall in progress.stalls
        ],
        "warnings": [
            line for line in (*warnings_of(progress), *journal_and_disk(progress), *_masked(progress)) if line
        ],
        "threshold": threshold_words(progress.threshold) if progress.HasField("threshold") else "",
        "shares": shares_of(progress.accounts),
    }


def _policy(policy: run_pb2.PolicyProgress) -> Json:
    return {
        "policy": policy.policy,
        "step": max(0, policy.version),
        "steps": policy.num_steps,
        "buffered": policy.num_buffered,
        "expected": policy.num_expected,
        "quota": policy.quota,
        "staleness_max": policy.staleness_max,
        "trainer": policy.trainer_state.replace("_", " "),
        "reward": policy.metrics.get(StepKey.ROLLOUT_REWARD_MEAN),
        "loss": policy.metrics.get(TrainerKey.LOSS.in_row),
    }


def _masked(progress: run_pb2.RunProgress) -> list[str]:
    return [line.strip() for line in masked_rollouts(progress.counters).splitlines()]
