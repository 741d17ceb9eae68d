"""The present state of a run, from its orchestrator, as plain JSON."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from services.cli.inspect.standing import RUNNING, Standing
from services.cli.watch.connect import check_answers, reach
from services.cli.watch.progress_view import state_word, threshold_words, time_words
from services.cli.watch.time_table import shares_of
from services.cli.watch.warnings import journal_and_disk, masked_rollouts, warnings_of
from services.common.errors import MillraceError
from services.common.pb import run_pb2
from services.common.security import identity
from services.common.telemetry.metrics import StepKey, TrainerKey

Json = dict[str, Any]

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
        except MillraceError as error:
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
