"""Where tasks come from, and how they are played and evaluated."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from services.common.config.base import Section


class WorkflowConfig(Section):
    name: str = "single_turn"
    """A built-in workflow (`single_turn`, `tool_use`) or an import path (`package.module:Class`)."""
    settings: dict[str, Any] = {}
    """Settings of the workflow; each workflow documents and checks its own."""


TRAIN, EVALUATION = "data.train", "data.evaluation"  # sections of datasets


class DatasetConfig(Section):
    path: str | None = None
    """A jsonl or parquet file, a directory that `datasets` can load, or a Hugging Face dataset name."""
    name: str | None = None
    """Instead of `path`: a dataset known by name, such as `deepscaler` or `math500`. Read from `MILLRACE_DATA_ROOT` when
    it lies there, else fetched from the hub; its rows are brought into one form."""
    generator: str | None = None
    """Instead of `path`: the import path (`package.module:function`) of a function that yields rows.
    It is called with `seed` and with `settings` as keyword arguments; it must be deterministic."""
    settings: dict[str, Any] = {}
    """Keyword arguments of the generator."""
    subset: str | None = None
    """Configuration name of a Hugging Face dataset; with `name`, instead of the one that is known."""
    split: str = "train"
    """Split of a Hugging Face dataset."""
    form: Literal["math", "code"] | None = None
    """With `path` or `generator`: bring rows of the layouts that known datasets have into the form that the reward of
    this name reads, and leave out those that are not understood. Left out, rows are taken as they are."""
    id_field: str | None = None
    """Column that names a task; left out, the row number does."""
    shuffle: bool = True
    """Draw tasks in a seeded random order, anew each pass. Evaluation never shuffles."""
    limit: int | None = Field(default=None, ge=1)
    """Take only the first rows."""
    max_prompt_tokens: int | None = Field(default=None, ge=1)
    """Leave out tasks whose text is longer, without chat template and instruction, and count them."""
    samples_per_task: int | None = Field(default=None, ge=1)
    """Under `data.evaluation` only: trajectories per task and sampling; left out, `evaluation.samples_per_task`."""
    seed: int = 0
    """Seeds generator and order, together with `run.seed` for training data."""

    @model_validator(mode="after")
    def _one_source(self) -> DatasetConfig:
        given = [source for source in ("path", "name", "generator") if getattr(self, source) is not None]
        if len(given) != 1:
            mend = f"; {' and '.join(given)} are set: write null for the one that is inherited" if given else ""
            raise ValueError(
                "set exactly one of `path` (a jsonl file or a hub name), `name` (a dataset known by name) and "
                f"`generator` (module:function){mend}"
            )
        if self.name is not None and self.form is not None:
            raise ValueError(f"form is {self.form!r}, and {self.name!r} has its own: leave form out")
        return self


class DataConfig(Section):
    train: DatasetConfig
    """Tasks to train on."""
    curation: Literal["accept_all", "filter_solved", "greso"] = "accept_all"
    """Which tasks are played: all; not those that are solved almost always (`filter_solved`: an average of the share of
    successes, which begins at 0 and keeps 0.9 of itself at every group, has reached 0.95: 29 solved groups in a row); or
    (GRESO) those whose rewards were all equal lately less often, the longer that lasts."""
    solved_reward: float = Field(default=1.0, allow_inf_nan=False)
    """With `filter_solved`: a rollout with at least this reward is a success."""
    revisit_solved: float = Field(default=0.0, ge=0.0, le=1.0)
    """With `filter_solved`: the chance with which a solved task is played all the same, so that one which the policy forgets
    comes back. 0, as in the reference, is never."""
    evaluation: dict[str, DatasetConfig] = {}
    """Fixed tasks to evaluate on: a name of yours -> dataset. Results are reported for each and overall."""

    @model_validator(mode="after")
    def _training_has_groups(self) -> DataConfig:
        if self.train.samples_per_task is not None:
            raise ValueError(
                f"train.samples_per_task is {self.train.samples_per_task}: it is for data.evaluation; "
                "write rollout.group_size for training"
            )
        return self

    def sections(self) -> dict[str, DatasetConfig]:
        """The datasets by the path of their section."""
        return {TRAIN: self.train} | {f"{EVALUATION}.{name}": config for name, config in self.evaluation.items()}

    def seed_of(self, section: str, run_seed: int) -> int:
        """What a section's generator is called with, and training tasks are ordered by."""
        return self.sections()[section].seed + (run_seed if section == TRAIN else 0)


class SamplingConfig(Section):
    temperature: float = Field(default=1.0, ge=0)
    """0 is greedy (evaluation only)."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus: draw from the likeliest tokens that together have this probability."""
    top_k: int = Field(default=0, ge=0)
    """Draw from the k likeliest tokens; 0 is off."""
    min_p: float = Field(default=0.0, ge=0, lt=1)
    """Draw from the tokens that have at least this share of the likeliest one's probability; 0 is off. What top_k, top_p and
    min_p keep is recorded with every training token, and log-probabilities are taken over it in engine and trainer."""
    max_new_tokens: int = Field(default=1024, ge=1)
    """Budget of one generation (one turn)."""
    min_new_tokens: int = Field(default=0, ge=0)
    """Stop tokens are not drawn before this many."""

    @model_validator(mode="after")
    def _min_below_max(self) -> SamplingConfig:
        if self.min_new_tokens > self.max_new_tokens:
            raise ValueError(f"min_new_tokens {self.min_new_tokens} exceeds max_new_tokens {self.max_new_tokens}")
        return self

    def cuts(self) -> list[str]:
        """The settings, with their values, that let tokens be drawn from a part of the distribution only."""
        off = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "min_new_tokens": 0}
        return [f"{key} {getattr(self, key)}" for key, value in off.items() if getattr(self, key) != value]


class EvaluationConfig(Section):
    at_start: bool = True
    """Evaluate version 0 before training."""
    at_end: bool = True
    """Evaluate the last version after training."""
    every: int = Field(default=0, ge=0)
    """Evaluate whenever all policies have taken this many more steps; 0 is never. Training goes on meanwhile."""
    engines: int = Field(default=1, ge=1)
    """Replicas that an evaluation during training takes for itself, with their versions pinned. With no more replicas than
    these, it is played on a share of their slots instead and is not pinned."""
    share: float = Field(default=0.25, gt=0, le=1)
    """That share."""
    policies: list[str] = []
    """Policies that play in evaluation; empty means all."""
    workflow: WorkflowConfig | None = None
    """The workflow of evaluation; left out, that of training."""
    pass_reward: float = 1.0
    """A trajectory with at least this reward counts as passed, for pass@k."""
    failed_reward: float | None = Field(default=None, allow_inf_nan=False)
    """What a failed rollout counts as. Left out: 0, or the lowest reward of its dataset in the same pass where that is
    lower, so that a failure never beats a rollout that was scored. Write the lowest reward of the environment where rewards
    are negative: scores of several passes then compare. A time-out of the policy's own is `rollout.on_timeout`'s."""
    samples_per_task: int = Field(default=1, ge=1)
    """Trajectories per task and sampling, where `data.evaluation.<name>.samples_per_task` says nothing else."""
    max_in_flight: int | None = Field(default=None, ge=1)
    """Trajectories of evaluations that are played at once; left out, the slots of their replicas are the bound."""
    samplings: dict[str, SamplingConfig] = {"greedy": SamplingConfig(temperature=0.0)}
    """Named ways of sampling; each is a pass over the evaluation data."""

    @model_validator(mode="after")
    def _a_task_fits_into_what_is_in_flight(self) -> EvaluationConfig:
        if self.max_in_flight is not None and self.max_in_flight < self.samples_per_task:
            raise ValueError(
                f"max_in_flight {self.max_in_flight} is below samples_per_task {self.samples_per_task}: the trajectories of a "
                "task are issued together"
            )
        return self
