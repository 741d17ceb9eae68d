"""Contents of ``summary.json``: the orchestrator writes the file at the end of a run, and the launcher adds its figures."""

from __future__ import annotations

from typing import NotRequired, TypedDict


class EstimateSummary(TypedDict):
    """A mean with its 95% interval."""

    value: float
    low: float
    high: float


class DatasetSummary(TypedDict):
    """One dataset of an evaluation; a test compares the keys with the orchestrator's record."""

    name: str
    num_items: int
    samples_per_item: int
    mean_reward: EstimateSummary | None  # None where every sample failed
    pass_at: dict[str, EstimateSummary]  # by k
    failed: list[str]  # task ids with a failed sample
    items: str  # digest of the tasks
    item_rewards: NotRequired[list[float]]  # in metrics/orchestrator.jsonl only
    difference: EstimateSummary | None  # to the first evaluation of its kind


class EvaluationSummary(TypedDict):
    """A finished evaluation; a test compares the keys with the journal's record."""

    versions: dict[str, int]
    newest_versions: dict[str, int]
    pinned: bool
    mean_reward: float | None  # None where every sample of a dataset failed
    num_trajectories: int
    num_failed: int
    num_opaque: int
    datasets: list[DatasetSummary]
    roles: dict[str, float]
    compared_with: str
    difference: EstimateSummary | None
    elapsed_s: float


class ThresholdSummary(TypedDict):
    """The state of ``run.until`` at the end."""

    reached: bool
    step: int  # training step of the evaluation that reached it; 0 is before training
    seconds: float  # from the start of the run to that evaluation
    wanted: str  # the threshold in words
    newest: float | None  # reward of the newest evaluation that counts


class RunSummary(TypedDict):
    run_id: str
    state: str
    steps: dict[str, int]  # trained steps by policy
    evaluations: dict[str, EvaluationSummary]  # by name
    until: ThresholdSummary | None  # None without ``run.until``
    overlap_share: float
    max_staleness: int
    seconds: float
    counters: dict[str, int]
    time: dict[str, dict[str, float]]  # component -> activity -> share of its time
    waited_for: dict[str, dict[str, float]]  # component -> awaited component -> share of its time
    # of the launcher
    cpu_seconds: NotRequired[float]
    cores: NotRequired[float]
    load: NotRequired[float]
