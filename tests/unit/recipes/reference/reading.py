"""Conversions of the reference's values, and values that no single key of a recipe holds. Knows no row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from services.common.config.data import DatasetConfig
from services.common.config.processes import engine_numbers
from services.common.config.recipe import Recipe
from services.common.rpc.client import DEADLINES
from services.orchestrator.tasks.rows import KnownDataset, known
from tests.unit.recipes.reference.table import Conversion, Place, Reader

# Conversions: a value there -> the value of our key that says the same.


def number(value: Any, recipe: Recipe) -> float:
    """``0`` and ``"1e-6"`` as floats."""
    return float(value)


def renamed(names: Mapping[Any, Any]) -> Conversion:
    """The reference's word -> ours; a word that is not named stays."""
    return lambda value, recipe: names.get(value, value)


def model_on_the_hub(value: Any, recipe: Recipe) -> str:
    """A local folder of a Qwen model -> its name on the hub."""
    return f"Qwen/{str(value).rpartition('/')[2]}"


def tasks_as_rollouts(value: Any, recipe: Recipe) -> int:
    """Prompts -> their samples."""
    return int(value) * recipe.rollout.group_size


def tasks_as_kept_rollouts(value: Any, recipe: Recipe) -> int:
    """Prompts -> the samples that resampling keeps of them."""
    (policy,) = recipe.policies.values()
    assert policy.batch.resample is not None
    return int(value) * policy.batch.resample.keep


def four_times(value: Any, recipe: Recipe) -> int:
    """Repeats of a data set that has each of its problems four times -> samples of a problem."""
    return int(value) * 4


def share_of_updates(total: int) -> Conversion:
    """A share of a schedule -> updates."""
    return lambda value, recipe: round(value * total)


def below_the_data_root(value: Any, recipe: Recipe) -> str:
    """A path there -> the same below ROLLMILL_DATA_ROOT."""
    return str(value).removeprefix("./data-data/")


# Readers: values of a resolved recipe that no single key holds.


def policy(name: str) -> Reader:
    """The policy ``name``, if the recipe has one."""

    def named(recipe: Recipe, place: Place) -> str:
        return name if name in recipe.policies else ""

    named.__doc__ = "name of the policy"
    return named


def engines(policy: str) -> Reader:
    """Engines of ``policy`` in the services that the file starts."""

    def number_of_engines(recipe: Recipe, place: Place) -> int:
        services = [service for name, service in recipe.inference.items() if place["service"] in ("*", name)]
        return sum(engine_numbers(service, service.policies or list(recipe.policies))[policy] for service in services)

    number_of_engines.__doc__ = f"engines of `{policy}`"
    return number_of_engines


def tasks_at_once(recipe: Recipe, place: Place) -> int:
    """Tasks that all services play at once."""
    return sum(service.num_slots for service in recipe.inference.values()) // recipe.rollout.group_size


def evaluation_workflow(recipe: Recipe, place: Place) -> str:
    """`evaluation.workflow.name`, which is that of training unless a recipe names another."""
    return (recipe.evaluation.workflow or recipe.workflow).name


def _evaluation_setting(recipe: Recipe, key: str) -> Any:
    return (recipe.evaluation.workflow or recipe.workflow).settings.get(key)


def evaluation_reward(recipe: Recipe, place: Place) -> Any:
    """`reward` of the workflow of evaluation."""
    return _evaluation_setting(recipe, "reward")


def evaluation_thinking(recipe: Recipe, place: Place) -> Any:
    """`thinking` of the workflow of evaluation."""
    return _evaluation_setting(recipe, "thinking")


_FIELDS = {"hub": "hub id", "subset": "hub configuration", "split": "split", "local": "local file"}


def _entry(dataset: DatasetConfig) -> KnownDataset:
    assert dataset.name is not None
    return known(dataset.name)


def training(field: str) -> Reader:
    """A field of the catalogue's entry of the training data set."""

    def in_catalogue(recipe: Recipe, place: Place) -> Any:
        return getattr(_entry(recipe.data.train), field)

    in_catalogue.__doc__ = f"{_FIELDS[field]} of `data.train.name`"
    return in_catalogue


def evaluation(name: str, field: str) -> Reader:
    """The same of the evaluation data set ``name``."""

    def in_catalogue(recipe: Recipe, place: Place) -> Any:
        return getattr(_entry(recipe.data.evaluation[name]), field)

    in_catalogue.__doc__ = f"{_FIELDS[field]} of `data.evaluation.{name}.name`"
    return in_catalogue


def environment_deadline_s(recipe: Recipe, place: Place) -> Any:
    """Deadline of a call, `StepEpisode`, in seconds."""
    return DEADLINES["StepEpisode"]


def nodes(recipe: Recipe, place: Place) -> int:
    """Nodes that the recipe names."""
    return len(recipe.nodes())


def resamples(recipe: Recipe, place: Place) -> bool:
    """Whether `batch.resample` is set."""
    return all(policy.batch.resample is not None for policy in recipe.policies.values())


def longest_sequence(recipe: Recipe, place: Place) -> int:
    """`workflow.settings.max_prompt_tokens` + `max_response_tokens`."""
    settings = recipe.workflow.settings
    return int(settings["max_prompt_tokens"]) + int(settings["max_response_tokens"])


def longest_response(value: Any, recipe: Recipe) -> int:
    """`seq_length - max_prompt_length` there: the bound of everything after the prompt in training."""
    assert value == "${subtract:${runner.seq_length}, ${data.max_prompt_length}}", value
    return 10_240 - 2048


def gpus(recipe: Recipe, place: Place) -> str:
    """GPUs."""
    generating = [gpu for service in recipe.inference.values() for gpu in service.gpus]
    training = [gpu for policy in recipe.policies.values() for gpu in policy.trainer.gpus]
    return f"{generating} generate, {training} train"
