"""The sources of a mixture in ``rollmill watch`` and ``status``: shares of trained sequences, rewards, staleness, and what was dropped."""

from __future__ import annotations

from collections.abc import Mapping

from rich.text import Text

from services.cli.console.tables import Column, FittingTable
from services.common.pb import run_pb2
from services.common.telemetry.metrics import StepKey, source_key, sources_in

_DASH = "-"


def source_table(progress: run_pb2.RunProgress) -> FittingTable:
    """A row for each source of each policy, as of the newest training step."""
    table = FittingTable(
        [
            *(Column("source"), Column("share", "right"), Column("wanted", "right"), Column("reward", "right")),
            *(Column("staleness", "right", 1), Column("rollouts", "right", 2), Column("equal groups", "right", 3)),
        ],
        box=None,
        name_left_out=False,
    )
    for policy in progress.policies:
        for source in sorted(sources_in(policy.metrics)):
            name = source if len(progress.policies) == 1 else f"{policy.policy}/{source}"
            table.add_row(Text(name), *_cells(policy.metrics, source))
    return table


def _cells(metrics: Mapping[str, float], source: str) -> list[str]:
    def value(key: StepKey, form: str) -> str:
        found = metrics.get(source_key(source, key))
        return _DASH if found is None else format(found, form)

    most = value(StepKey.STALENESS_MAX, ".0f")
    return [
        value(StepKey.SHARE, ".1%"),
        value(StepKey.WANTED_SHARE, ".1%"),
        value(StepKey.ROLLOUT_REWARD_MEAN, ".3f"),
        most if most == _DASH else f"≤ {most}",
        value(StepKey.ROLLOUTS_FINISHED, ".0f"),
        value(StepKey.GROUPS_EQUAL_DROPPED, ".0f"),
    ]


def source_words(row: Mapping[str, float]) -> str:
    """The sources of a row of a training step in one line; empty for a run with one dataset. A source without a rollout
    that ended since the batch before has the mean reward of the batch.

    >>> source_words({"source/a/share": 0.25, "source/a/wanted_share": 0.25, "source/a/rollout_reward_mean": 0.5})
    'a 25.0% of the sequences (wanted 25.0%), reward 0.500'
    """
    told = []
    for source in sources_in(row):
        share, wanted, reward, *_ = _cells(row, source)
        batch = row.get(source_key(source, StepKey.BATCH_REWARD_MEAN))
        shown = f"batch reward {batch:.3f}" if reward == _DASH and batch is not None else f"reward {reward}"
        told.append(f"{source} {share} of the sequences (wanted {wanted}), {shown}")
    return "; ".join(told)
