"""Settings of datasets, workflows, sampling and evaluation."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, field_validator, model_validator

from services.common.config.base import Section, refuse_unread
from services.common.dataset_rows import HARBOR, BuiltInReward, BuiltInTool, BuiltInWorkflow

# Rewards that built-in workflows ask for where a recipe names none.
_REWARDS: dict[str, BuiltInReward] = {
    BuiltInWorkflow.SINGLE_TURN: BuiltInReward.MATH,
    BuiltInWorkflow.TOOL_USE: BuiltInReward.MATH,
    BuiltInWorkflow.TOOL_MATH: BuiltInReward.MATH,
    BuiltInWorkflow.ACTOR_VERIFIER: BuiltInReward.MATH,
    BuiltInWorkflow.CODEGEN_VERIFIER: BuiltInReward.CODE,
}


class WorkflowConfig(Section):
    name: str = BuiltInWorkflow.SINGLE_TURN.value
    """A built-in workflow (`single_turn`, `tool_use`) or an import path (`package.module:Class`)."""
    settings: dict[str, Any] = {}
    """Settings of the workflow; each workflow documents and checks its own."""

    @property
    def reward(self) -> Any:
        """The setting `reward`, or the default of a built-in workflow; None where neither names one, or an environment rewards."""
        if self.name == BuiltInWorkflow.AGENT_ENV:
            return None
        return self.settings.get("reward", _REWARDS.get(self.name))

    def runs_programs(self) -> str | None:
        """The key and the value by which the gateway runs programs for this workflow, as far as built-in names tell: a
        workflow, an environment or a tool by import path may run some, too."""
        settings = self.settings
        if self.name == BuiltInWorkflow.CODEGEN_VERIFIER:
            return f"name: {self.name}"
        if self.reward == BuiltInReward.CODE:
            return f"settings.reward: {BuiltInReward.CODE}"
        if self.name in (BuiltInWorkflow.TOOL_MATH, BuiltInWorkflow.TOOL_USE):
            if settings.get("format") == "code":
                return "settings.format: code"
            tools = set(settings.get("tools") or [BuiltInTool.PYTHON_WITH_INPUT]) & set(BuiltInTool)
            return f"settings.tools: {min(tools)}" if tools else None
        if self.name == BuiltInWorkflow.AGENT_ENV and settings.get("environment") in (HARBOR, "tool"):
            return f"settings.environment: {settings['environment']}"
        return None


TRAIN, EVALUATION = "data.train", "data.evaluation"  # sections of datasets
SOURCES = (
    "path",
    "name",
    "generator",
    "verifiers",
    "reasoning_gym",
    "harbor",
)  # keys of a section, of which it has one


# Settings of a dataset that belong to its source; the others (limit, samples_per_task, ...) are kept.
_OF_SOURCE = (*SOURCES, "size", "settings", "subset", "split", "form", "id_field", "columns")


def merge(base: Mapping[str, Any], top: Any, place: tuple[str, ...] = ()) -> Any:
    """``top`` over ``base``: mappings key by key, everything else replaced. ``place``: their path in the recipe.

    A workflow of another name, and the source of a dataset of another kind, begin anew: the base's settings were for that
    of the base.

    >>> merge({"workflow": {"name": "tool_use", "settings": {"max_turns": 3}}}, {"workflow": {"name": "single_turn"}})
    {'workflow': {'name': 'single_turn'}}
    """
    if not isinstance(top, Mapping):
        return top
    merged = dict(base)
    if place in (("workflow",), ("evaluation", "workflow")):
        name, inherited = top.get("name"), base.get("name")
        merged = {} if None not in (name, inherited) and name != inherited else merged
    elif place == ("data", "train") or (place[:2] == ("data", "evaluation") and len(place) == 3):
        named = [key for key in SOURCES if top.get(key) is not None]
        if named and all(base.get(key) is None for key in named):
            merged = {key: value for key, value in base.items() if key not in _OF_SOURCE}
    for key, value in top.items():
        old = merged.get(key)
        merged[key] = merge(old, value, (*place, key)) if isinstance(old, Mapping) else value
    return merged


def is_training(section: str) -> bool:
    """Whether a section of datasets is of training.

    >>> is_training("data.train"), is_training("data.train.maths"), is_training("data.evaluation.maths")
    (True, True, False)
    """
    return section == TRAIN or section.startswith(f"{TRAIN}.")


def name_of(section: str) -> str:
    """The name of a section's source or dataset; empty for the only dataset of training.

    >>> name_of("data.train"), name_of("data.train.maths"), name_of("data.evaluation.held_out")
    ('', 'maths', 'held_out')
    """
    for prefix in (TRAIN, EVALUATION):
        if section.startswith(f"{prefix}."):
            return section[len(prefix) + 1 :]
    return ""


class DatasetConfig(Section):
    path: str | None = None
    """A file of rows (JSON Lines, a JSON array, CSV or TSV with a header, Parquet), a directory that `datasets` can load, or
    a Hugging Face dataset name. A path that begins with `./` or `../` is relative to the recipe's file."""
    name: str | None = None
    """Instead of `path`: a dataset known by name, such as `deepscaler` or `math500`. Read from `ROLLMILL_DATA_ROOT`
    when the file is there, else fetched from the hub; all rows get one form."""
    generator: str | None = None
    """Instead of `path`: the import path (`package.module:function`) of a function that yields rows.
    The arguments are `seed` and, by keyword, `settings`; equal arguments must give equal rows."""
    verifiers: str | None = None
    """Instead of `path`: an installed environment of the package verifiers, by its name or its name on the hub. Its tasks
    are the rows, which the workflow `verifiers` plays."""
    reasoning_gym: str | None = None
    """Instead of `path`: a task of the package reasoning-gym by its name, such as `chain_sum` (extra `reasoning-gym`). Its
    own score is the reward `reasoning_gym`."""
    harbor: str | None = None
    """Instead of `path`: a directory whose subdirectories are tasks in the form of Harbor (`task.toml`, `instruction.md`,
    `environment`, `tests`). The workflow `agent_env` plays them in the environment `harbor`."""
    size: int | None = Field(default=None, ge=1)
    """With `reasoning_gym`: how many tasks are made; left out, 500."""
    settings: dict[str, Any] = {}
    """Keyword arguments of the generator, the configuration of the verifiers environment, or the settings of the
    reasoning-gym task, such as `{max_digits: 2}`."""
    subset: str | None = None
    """Configuration name of a Hugging Face dataset; with `name`, instead of the one that is known."""
    split: str = "train"
    """Split of a Hugging Face dataset."""
    form: Literal["math", "code"] | None = None
    """With `path` or `generator`: bring rows of the layouts that known datasets have into the form that the reward of
    this name reads, and leave out those that are not understood. Left out, rows are taken as they are."""
    columns: dict[str, str] = {}
    """Names for columns, such as `{prompt: question, answer: solution}`: a row then has its column `question` under `prompt`
    too. A column within another one is written with dots: `{answer: extra.answer}`."""
    id_field: str | None = None
    """Column that names a task; left out, the row number does."""
    shuffle: bool = True
    """Draw tasks in a seeded random order, anew each pass. Evaluation never shuffles."""
    limit: int | None = Field(default=None, ge=1)
    """Take only the first rows; with `hold_out`, the first of those that training keeps, or that are held out."""
    hold_out: int | None = Field(default=None, ge=2)
    """Holds out every so-many-th row: training leaves these rows out, and a dataset under `data.evaluation` with the same
    rows and the same number takes these alone."""
    max_prompt_tokens: int | None = Field(default=None, ge=1)
    """Leave out tasks with a longer text, without chat template and instruction, and count them."""
    opaque_tests: Literal["leave_out", "together"] | None = None
    """For the reward `code`: rows whose test code cannot be read as calls and values are left out and counted, or judged
    with the program in one process, where the program can forge the verdict (docs/envgateway.md). Left out, training
    leaves such rows out, and evaluations judge them and mark the verdict."""
    samples_per_task: int | None = Field(default=None, ge=1)
    """Under `data.evaluation` only: trajectories per task and sampling; left out, `evaluation.samples_per_task`."""
    workflow: WorkflowConfig | None = None
    """What plays these tasks, with a reward or an environment of its own; left out, `workflow`, or for evaluation
    `evaluation.workflow`. Without a `name`, or with the same one, its settings go over those of that one."""
    seed: int = 0
    """Seeds generator and order, together with `run.seed` for training data."""

    @model_validator(mode="after")
    def _one_source(self) -> DatasetConfig:
        given = [source for source in SOURCES if getattr(self, source) is not None]
        if len(given) != 1:
            mend = f"; {' and '.join(given)} are set: write null for the one that is inherited" if given else ""
            raise ValueError(
                "set exactly one of `path` (a jsonl file or a hub name), `name` (a dataset known by name), `generator` "
                f"(module:function), `verifiers` (an environment), `reasoning_gym` (a task of that package) and `harbor` (a directory of tasks){mend}"
            )
        if self.size is not None and self.reasoning_gym is None:
            raise ValueError(f"size is {self.size}, and only reasoning_gym has a size: write limit: {self.size}")
        if self.name is not None and self.columns:
            raise ValueError(
                f"columns are given, and the rows of {self.name!r} have their own form: leave columns out, or name the data "
                "set with `path`"
            )
        if self.name is not None and self.form is not None:
            raise ValueError(f"form is {self.form!r}, and {self.name!r} has its own: leave form out")
        return self

    def num_read(self, *, held_out: bool) -> int | None:
        """How many rows the first `limit` ones are among, of those that are held out or of the others."""
        if self.limit is None or self.hold_out is None:
            return self.limit
        return self.limit * self.hold_out if held_out else self.limit + (self.limit - 1) // (self.hold_out - 1)


class SourceConfig(DatasetConfig):
    """One of several datasets that are trained together (docs/mixtures.md)."""

    source: str = ""
    """Name of the source in metrics; left out, that of its file, dataset or generator."""
    weight: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """Its share of the trained sequences, relative to the weights of the other sources."""
    advantage_scale: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """Factor on the advantages of its sequences, after all other settings of `algorithm`."""

    @model_validator(mode="before")
    @classmethod
    def _named(cls, tree: Any) -> Any:
        if not isinstance(tree, Mapping) or tree.get("source"):
            return tree
        read = next(
            (tree[key] for key in ("name", "path", "generator", "harbor") if isinstance(tree.get(key), str)), ""
        )
        return {**tree, "source": label_of(read)}

    @field_validator("source")
    @classmethod
    def _plain_name(cls, value: str) -> str:
        if _NOT_PLAIN.search(value):
            raise ValueError(f"{value!r} is no plain name: use letters, digits, '-' and '_'")
        return value


_NOT_PLAIN = re.compile(r"[^A-Za-z0-9_-]+")


def label_of(read: str) -> str:
    """The name of a source that reads this file, dataset or generator.

    >>> label_of("data/my rows.jsonl"), label_of("openai/gsm8k"), label_of("mine.tasks:sums")
    ('my-rows', 'gsm8k', 'sums')
    """
    last = re.split(r"[/:]", read.rstrip("/"))[-1]
    return _NOT_PLAIN.sub("-", last.rpartition(".")[0] or last).strip("-") or "rows"


Curation = Literal["accept_all", "filter_solved", "greso", "pass_rate"]


class DataConfig(Section):
    train: Annotated[
        Annotated[DatasetConfig, Tag("one")] | Annotated[list[SourceConfig], Tag("several")],
        Discriminator(lambda value: "several" if isinstance(value, (list, tuple)) else "one"),
    ]
    """Tasks to train on: a dataset, or a list of datasets that are mixed by `weight` (docs/mixtures.md)."""
    curation: Curation = "accept_all"
    """Which tasks are played: all; not those that are solved almost always (`filter_solved`: an average of the share of
    successes, which begins at 0 and keeps 0.9 of itself at every group, has reached 0.95: 29 solved groups in a row);
    those whose pass rate lies in `pass_rate` (`pass_rate`); or (GRESO) tasks with equal rewards lately come less often,
    and less the longer that lasts. Each source has a curation of its own."""
    solved_reward: float = Field(default=1.0, allow_inf_nan=False)
    """With `filter_solved` and `pass_rate`: a rollout with at least this reward is a success."""
    revisit_solved: float = Field(default=0.0, ge=0.0, le=1.0)
    """With `filter_solved` and `pass_rate`: the chance with which a solved task is played all the same, so that one which
    the policy forgets comes back. 0, as in the reference, is never."""
    pass_rate: tuple[float, float] = (0.05, 0.95)
    """With curation `pass_rate`: the lowest and the highest share of successes, both included, at which a task is played.
    Measured over its last `pass_rate_groups` task groups; a task with fewer is played."""
    evaluation: dict[str, DatasetConfig] = {}
    """Fixed tasks to evaluate on: a name of yours -> dataset. Results are reported for each and overall."""

    @model_validator(mode="before")
    @classmethod
    def _sources_are_a_list(cls, tree: Any) -> Any:
        train = tree.get("train") if isinstance(tree, Mapping) else None
        if train == []:
            raise ValueError("train is an empty list: write a dataset, such as {path: ./rows.jsonl}")
        if isinstance(train, Mapping):
            for key in ("source", "weight", "advantage_scale"):
                if key in train:
                    raise ValueError(
                        f"train.{key} is for several sources: write train as a list, [{{..., {key}: ...}}, ...]"
                    )
        return tree

    @model_validator(mode="after")
    def _fits_together(self) -> DataConfig:
        for where, config in self.training.items():
            if config.samples_per_task is not None:
                raise ValueError(
                    f"{where.removeprefix('data.')}.samples_per_task is {config.samples_per_task}: it is for data.evaluation; "
                    "write rollout.group_size for training"
                )
        if isinstance(self.train, list):
            count = Counter(config.source for config in self.train)
            twice = [place for place, config in enumerate(self.train) if count[config.source] > 1]
            if twice:
                places = " and ".join(f"train.{place}" for place in twice)
                raise ValueError(
                    f"{places} are both called {self.train[twice[0]].source!r}: write `source: NAME` in each, a name of its own"
                )
        by_successes = ("filter_solved", "pass_rate")
        refuse_unread(
            self,
            "curation",
            {"solved_reward": by_successes, "revisit_solved": by_successes, "pass_rate": ("pass_rate",)},
        )
        low, high = self.pass_rate
        if not 0 <= low <= high <= 1:
            raise ValueError(f"pass_rate is [{low:g}, {high:g}]: write the lower share first, both from 0 to 1")
        return self

    @property
    def training(self) -> dict[str, DatasetConfig]:
        """The datasets of training by the path of their section: ``data.train``, or ``data.train.SOURCE`` of each."""
        if isinstance(self.train, list):
            return {f"{TRAIN}.{config.source}": config for config in self.train}
        return {TRAIN: self.train}

    @property
    def sources(self) -> dict[str, SourceConfig]:
        """The sources of a mixture by name; empty for a single dataset."""
        return {config.source: config for config in self.train} if isinstance(self.train, list) else {}

    def sections(self) -> dict[str, DatasetConfig]:
        """The datasets by the path of their section."""
        return self.training | {f"{EVALUATION}.{name}": config for name, config in self.evaluation.items()}

    def seed_of(self, section: str, run_seed: int) -> int:
        """The seed of a section's generator and of the order of training tasks."""
        return self.sections()[section].seed + (run_seed if is_training(section) else 0)


DEFAULT_NEW_TOKENS = 1024


class SamplingConfig(Section):
    temperature: float = Field(default=1.0, ge=0)
    """0 is greedy (evaluation only)."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus: draw from the likeliest tokens that together have this probability."""
    top_k: int = Field(default=0, ge=0)
    """Draw from the k likeliest tokens; 0 is off."""
    min_p: float = Field(default=0.0, ge=0, lt=1)
    """Draw from the tokens that have at least this share of the likeliest one's probability; 0 is off. The tokens that
    top_k, top_p and min_p keep are recorded with every training token; log-probabilities in engine and trainer are
    taken over them."""
    max_new_tokens: int = Field(default=DEFAULT_NEW_TOKENS, ge=1)
    """Budget of one generation (one turn). Left out, half of the smallest context where that is below 1024; in
    `evaluation.samplings`, that of `sampling`."""
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
    during_samplings: list[str] = []
    """Ways of sampling, of `samplings`, that evaluations every so many steps play; empty means all."""
    during_tasks: int | None = Field(default=None, ge=1)
    """Tasks of each dataset that they play: at each the next ones of a fixed random order, so that two in a row share none
    while there are enough. Left out, all tasks."""
    engines: int = Field(default=1, ge=1)
    """Replicas that an evaluation during training takes for itself, with their versions pinned, until its last task has
    begun; training groups begin on the others. With no more replicas than these, no training group begins meanwhile."""
    share: float | None = Field(default=None, gt=0, le=1)
    """For an evaluation that would take all replicas: the share of their slots that it uses beside training. It is pinned
    where all its trajectories fit into that share of one replica; else it follows training, and its versions are a range.
    Left out, the evaluation is pinned, and training waits."""
    policies: list[str] = []
    """Policies that play in evaluation; empty means all."""
    workflow: WorkflowConfig | None = None
    """The workflow of evaluation; left out, that of training."""
    pass_reward: float = 1.0
    """A trajectory with at least this reward counts as passed, for pass@k."""
    failed_reward: float | None = Field(default=None, ge=-1e6, le=1e6)
    """The reward that a failed rollout counts as. Left out: 0, or the lowest reward of its dataset in the same pass
    where that is lower, so that a failure never beats a rollout that was scored. Write the lowest reward of the
    environment where rewards are negative: scores of several passes then compare. A time-out of the policy's own is
    `rollout.on_timeout`'s."""
    samples_per_task: int = Field(default=1, ge=1)
    """Trajectories per task and sampling, unless `data.evaluation.<name>.samples_per_task` is set."""
    max_in_flight: int | None = Field(default=None, ge=1)
    """Trajectories of evaluations that are played at once; left out, the slots of their replicas are the bound."""
    samplings: dict[str, SamplingConfig] = {"greedy": SamplingConfig(temperature=0.0)}
    """Named ways of sampling; each is a pass over the evaluation data."""

    @model_validator(mode="after")
    def _fits_together(self) -> EvaluationConfig:
        for name in self.during_samplings:
            if name not in self.samplings:
                raise ValueError(
                    f"during_samplings names {name!r}, which is not in samplings; write of {sorted(self.samplings)}"
                )
        if self.max_in_flight is not None and self.max_in_flight < self.samples_per_task:
            raise ValueError(
                f"max_in_flight {self.max_in_flight} is below samples_per_task {self.samples_per_task}: the trajectories of a "
                "task are issued together"
            )
        return self
