"""One pass of an evaluation: the issued part, the outcomes so far, and the result. Independent of replicas and datasets."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from services.common.finite import finite
from services.common.records.types import Sampling, Trajectory
from services.common.telemetry.metrics import RolloutKey
from services.orchestrator.buffer.assembly import MOST_ROLES, OTHER_ROLES
from services.orchestrator.dispatch.threshold import step_of
from services.orchestrator.journal.records import EvaluationResult
from services.orchestrator.state.groups import Outcome
from services.orchestrator.state.scores import DatasetScore, compared, overall, overall_difference


def kind_of(name: str) -> str:
    """Kind of a pass, the same for all versions: its sampling, and its policy where policies play apart.

    >>> kind_of("start/greedy/model0")
    'greedy/model0'
    """
    return name.partition("/")[2]


def played_by(name: str, versions: Mapping[str, int], newest: Mapping[str, int]) -> str:
    """The versions of an evaluation in words, where they are not the one of the step that it names; else empty.

    >>> played_by("step-4/greedy", {"a": 4}, {"a": 8}), played_by("step-4/greedy", {"a": 4}, {"a": 4})
    (' (versions 4 to 8)', '')
    >>> played_by("step-4/greedy", {"a": 4, "b": 5, "frozen": 0}, {"a": 4, "b": 5, "frozen": 0})
    ' (b version 5)'
    """
    step, told = step_of(name.partition("/")[0]), []
    for policy, oldest in sorted(versions.items()):
        last = newest.get(policy, oldest)
        if oldest != last or (step is not None and oldest not in (0, step)):  # 0 also of a policy that is not trained
            words = f"version {oldest}" if oldest == last else f"versions {oldest} to {last}"
            told.append(f"{policy} {words}" if len(versions) > 1 else words)
    return f" ({', '.join(told)})" if told else ""


@dataclass(slots=True, kw_only=True)
class EvaluationPass:
    """A pass with one sampling setting over all evaluation tasks."""

    name: str  # "start/greedy"
    evaluation_id: str
    wanted: Mapping[str, int]  # versions to be evaluated, or newer ones where training goes on
    sampling: Sampling
    samples: tuple[int, ...]  # by row; 0 for one that is not played
    policies: tuple[str, ...] = ()  # that play; () is all of the run
    versions: Mapping[str, int] = field(default_factory=dict)  # pinned versions, once decided
    pinned: bool | None = None  # None until the replicas are decided
    evaluators: frozenset[str] = frozenset()  # replicas that run this pass and no training; empty: any replica
    awaited: frozenset[str] = frozenset()  # until the decision: replicas that hear of no version beyond the next
    next_row: int = 0
    issued_rows: set[int] = field(default_factory=set)  # before a restart
    rewards: dict[int, list[float | None]] = field(default_factory=dict)  # by row; None where no number is given
    failed: dict[int, list[float | None]] = field(default_factory=dict)  # the same of samples that failed
    num_issued: int = 0
    begun: tuple[float, int] | None = field(default=None, repr=False)  # first look, and the samples resolved by then
    num_resolved: int = 0
    num_failed: int = 0
    num_opaque: int = 0
    oldest: dict[str, int] = field(default_factory=dict)  # versions seen in the outcomes
    newest: dict[str, int] = field(default_factory=dict)
    finished_at: float = 0.0  # of the newest trajectory, in seconds since the epoch
    group_ids: set[str] = field(default_factory=set)
    roles: dict[str, tuple[float, int]] = field(default_factory=dict)  # "policy/role/attempt" -> rewards, sequences

    @property
    def num_trajectories(self) -> int:
        return sum(self.samples)

    def standing(self) -> str:
        """How far the pass is, with the time left at its pace since the first call.

        >>> EvaluationPass(name="start/greedy", evaluation_id="start", wanted={}, sampling=Sampling(), samples=(1,) * 50).standing()
        'evaluation start/greedy: 0 of 50'
        """
        told = f"evaluation {self.name}: {self.num_resolved} of {self.num_trajectories}"
        if self.begun is None and self.num_issued:
            self.begun = time.monotonic(), self.num_resolved
        begun_at, before = self.begun or (0.0, self.num_resolved)
        if before == self.num_resolved:
            return told
        each_s = (time.monotonic() - begun_at) / (self.num_resolved - before)
        return f"{told}, about {each_s * (self.num_trajectories - self.num_resolved):.0f} s left"

    @property
    def finished(self) -> bool:
        return self.num_resolved == self.num_trajectories

    @property
    def has_left(self) -> bool:
        """Whether a row is left to issue."""
        while self.next_row in self.issued_rows or (self.next_row < len(self.samples) and not self.next_samples):
            self.next_row += 1
        return self.next_row < len(self.samples)

    @property
    def next_samples(self) -> int:
        """Samples of the next row."""
        return self.samples[self.next_row]

    @property
    def num_in_flight(self) -> int:
        """Issued trajectories without an outcome."""
        return self.num_issued - self.num_resolved

    def required(self) -> Mapping[str, int]:
        return self.versions if self.pinned else {}

    def issue(self, group_id: str, row: int) -> None:
        """Count the trajectories of a group of the pass, once."""
        if group_id not in self.group_ids:
            self.group_ids.add(group_id)
            self.num_issued += self.samples[row]

    def note(self, outcome: Outcome, reward: float | None, row: int) -> None:
        """Count an outcome of a group of the pass, with the value ``reward``."""
        self.num_resolved += 1
        if not isinstance(outcome, Trajectory):
            self.num_failed += 1
            self.failed.setdefault(row, []).append(reward)
            return
        self.rewards.setdefault(row, []).append(reward)
        metrics = [outcome.metrics, *(sequence.metrics for sequence in outcome.sequences)]
        self.num_opaque += any(RolloutKey.REWARD_OPAQUE.value in some for some in metrics)
        self.finished_at = max(self.finished_at, outcome.finished_at)
        for sequence in outcome.sequences:
            role = f"{sequence.policy}/{sequence.role}/{sequence.attempt}"
            if role not in self.roles and len(self.roles) >= MOST_ROLES:
                role = OTHER_ROLES
            total, count = self.roles.get(role, (0.0, 0))
            self.roles[role] = (finite(total + sequence.reward), count + 1)
            for segment in sequence.segments:
                if segment.is_policy:
                    policy, version = sequence.policy, segment.weight_version
                    self.oldest[policy] = min(version, self.oldest.get(policy, version))
                    self.newest[policy] = max(version, self.newest.get(policy, version))

    def result(
        self, scores: tuple[DatasetScore, ...], base: EvaluationResult | None, started_at: float
    ) -> EvaluationResult:
        """The result of the finished pass, compared with the first one of its kind (``base``)."""
        pinned = bool(self.pinned)
        return EvaluationResult(
            name=self.name,
            versions=dict(self.versions if pinned else self.oldest or self.wanted),
            newest_versions=dict(self.versions if pinned else self.newest or self.wanted),
            pinned=pinned,
            mean_reward=overall(scores),
            num_trajectories=self.num_trajectories,
            num_failed=self.num_failed,
            num_opaque=self.num_opaque,
            datasets=compared(base.datasets, scores) if base is not None else scores,
            compared_with=base.name if base is not None else "",
            difference=overall_difference(base.datasets, scores) if base is not None else None,
            roles={role: total / count for role, (total, count) in sorted(self.roles.items())},
            elapsed_s=max(0.0, self.finished_at - started_at),
        )
