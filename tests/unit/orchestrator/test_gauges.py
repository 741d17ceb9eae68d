"""Every gauge of the orchestrator has a separate metric, and counters begin with the process."""

from __future__ import annotations

from pathlib import Path

from extras.prometheus.server import OTHER, samples_of
from services.orchestrator.progress import METRICS, gauges
from services.orchestrator.tasks.prompts import keep_short
from services.orchestrator.tasks.rows import ListRows, UsableRows
from tests.unit.orchestrator.world import World

COUNTERS = {
    "failures_timeout": ("rollmill_rollout_failures_total", ("timeout",)),
    "records_duplicate": ("rollmill_records_dropped_total", ("duplicate",)),
    "sequences_replayed": ("rollmill_sequences_replayed_total", ()),
    "sequences_expired": ("rollmill_sequences_dropped_total", ("expired",)),
    "task_groups_issued": ("rollmill_task_groups_total", ("issued",)),
    "slots_reissued": ("rollmill_slots_reissued_total", ()),
    "replica_leases_lost": ("rollmill_leases_lost_total", ("replica",)),
    "masked/actor/grader_failed": ("rollmill_masked_samples_total", ("actor", "grader_failed")),
    "redrawn/actor/episode_lost": ("rollmill_redrawn_samples_total", ("actor", "episode_lost")),
    "pauses_for_failures": ("rollmill_events_total", ("pauses_for_failures",)),
}


async def test_every_gauge_and_counter_of_the_orchestrator_has_its_metric(tmp_path: Path) -> None:
    world = World(tmp_path, policies=("actor", "verifier"))
    try:
        parts = world.core
        parts.counters.update(dict.fromkeys(COUNTERS, 5))
        parts.last_metrics["actor"] = {"trainer/loss": 0.5, "rollout_reward_mean": 1.0, "broken": float("nan")}
        rows = [{"prompt": "a"}, {"prompt": "a a"}, {"prompt": {1, 2}}, {"answer": "1"}]
        counters = [lambda texts: [len(text.split()) for text in texts]]
        train = keep_short(UsableRows(ListRows(rows, "train"), None), 1, counters, None, "data.train")
        held_out = UsableRows(ListRows(rows, "held_out"), None)
        found = gauges(world.core, {"data.train": train, "data.evaluation.held_out": held_out}, {"slots_reissued": 2})
        samples = list(samples_of(found, METRICS))
        assert not [sample for sample in samples if sample[0] is OTHER]
        values = {(metric.name, labels): value for metric, labels, value in samples}
        for name, told in COUNTERS.items():
            assert values[told] == (3.0 if name == "slots_reissued" else 5.0)
        told = ("tasks_too_long", "rows_left_out")
        assert [values[f"rollmill_{name}", ("data.train",)] for name in told] == [1.0, 2.0]
        assert [values[f"rollmill_{name}", ("data.evaluation.held_out",)] for name in told] == [0.0, 1.0]
        assert values["rollmill_tasks", ()] == 1.0
        assert values["rollmill_step_metric", ("actor", "trainer/loss")] == 0.5
        assert ("rollmill_step_metric", ("actor", "broken")) not in values
        assert {labels for name, labels in values if name == "rollmill_quota_sequences"} == {("actor",), ("verifier",)}
    finally:
        await world.close()
