"""What people see of a run that goes on."""

from __future__ import annotations

from io import StringIO

from rich.console import Console

from services.cli.progress_view import ProgressView, render
from services.common.pb import run_pb2


def told(policy: run_pb2.PolicyProgress) -> str:
    console = Console(record=True, width=140)
    console.print(render(run_pb2.RunProgress(policies=[policy]), "run"))
    return console.export_text()


def test_where_no_rollout_finished_since_the_batch_before_there_is_no_mean_reward() -> None:
    """Defect 12: nothing else, not even 0, stands in its place."""
    policy = run_pb2.PolicyProgress(policy="model0", version=3, num_steps=9, metrics={"rollout_reward_mean": 0.25})
    assert "rollout" in told(policy) and "reward" in told(policy)
    assert "0.250" in told(policy)
    without = run_pb2.PolicyProgress(policy="model0", version=3, num_steps=9, metrics={"batch_reward_mean": 0.25})
    assert "0.250" not in told(without)
    assert "0.000" not in told(without)


def test_damaged_checkpoints_are_told_once_with_the_command_that_lists_them() -> None:
    progress = run_pb2.RunProgress(counters={"damaged_checkpoints": 1, "failed_checkpoints": 2})
    plain = StringIO()
    with ProgressView(Console(file=plain, width=200), "run") as view:
        view.show(progress)
        view.show(progress)
    assert plain.getvalue().count("checkpoints: 1 set aside as damaged (millrace checkpoints RUN); 2 could not be") == 1
