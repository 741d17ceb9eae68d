"""Compares numbers of a recipe with each other, with the model and with the disk: what one allows, another may not hold.

Each problem names both keys with their values. The checks read no weights and no rows.
"""

from __future__ import annotations

import inspect
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from services.cli.check.model_files import lacks_chat_template, other_architecture, positions, weight_names
from services.common.config.consistency import ONE_SEQUENCE
from services.common.config.data import WorkflowConfig, is_training
from services.common.config.processes.mcp import MCP
from services.common.config.recipe import Recipe
from services.common.config.training.adapter import AdapterConfig
from services.common.config.training.policy import PolicyConfig
from services.common.errors import ConfigError
from services.common.records.dataset_rows import BuiltInReward, BuiltInWorkflow
from services.inference.workflows.registry import load_workflow, workflow_settings

HIGHEST_LR = 0.1
BUILT_IN_ENVIRONMENTS = ("textworld", "alfworld", "harbor", "webshop")  # the first is agent_env's default


def size_problems(recipe: Recipe) -> list[str]:
    """A line for each contradiction."""
    found = [
        *_model_problems(recipe),
        *_gateway_problems(recipe),
        *_directory_problems(recipe),
        *_plan_problems(recipe),
    ]
    for name, policy in recipe.trained_policies.items():
        if recipe.run.steps:
            found += _batch_problems(name, policy, recipe)
        if policy.optimizer.lr > HIGHEST_LR:
            found.append(
                f"policies.{name}.optimizer.lr is {policy.optimizer.lr:g}: AdamW moves every weight by about that much in each "
                f"update. Write at most {HIGHEST_LR:g}; pretrained models take 1e-7 to 1e-5, tiny ones 1e-3"
            )
    return found


def size_notes(recipe: Recipe) -> list[str]:
    """A line for each setting that may be meant, as in a short trial of a long run, and is a mistake otherwise."""
    notes = []
    for name in recipe.trained_policies if recipe.run.steps else ():
        optimizer = recipe.optimizer(name)
        if optimizer.total_updates is not None and optimizer.warmup_updates >= optimizer.total_updates:
            notes.append(
                f"policies.{name}.optimizer.warmup_updates is {optimizer.warmup_updates}, and the run has {optimizer.total_updates} "
                "updates (run.steps times batch.minibatches): lr is never reached"
            )
    return notes


def _model_problems(recipe: Recipe) -> Iterator[str]:
    for name, policy in recipe.policies.items():
        path, length = policy.model.path, policy.model.context_length
        if path is None:
            continue
        longest = positions(path)
        if longest is not None and length > longest:
            yield (
                f"policies.{name}.model.context_length is {length}, and {path} has {longest} positions "
                f"(max_position_embeddings of its config.json): write at most {longest}"
            )
        if name in recipe.playing_policies and lacks_chat_template(path):
            yield (
                f"policies.{name}.model.path: the tokenizer of {path} has no chat template, so no prompt can be written: take an "
                "instruction-tuned model, or put a chat_template.jinja into the directory"
            )
        if policy.adapter is not None:
            yield from _target_problems(name, path, policy.adapter)
        if (other := other_architecture(path)) is not None:
            yield f"policies.{name}.model.path: {path} is a {other}, and no causal language model: take a model that generates"


def _target_problems(name: str, path: str, adapter: AdapterConfig) -> Iterator[str]:
    """Targets of an adapter that no weight of the model belongs to."""
    parts = [weight.split(".") for weight in weight_names(path) if weight.endswith(".weight")]
    modules = {found[-2] for found in parts if len(found) > 1}
    if not modules or isinstance(adapter.targets, str):
        return
    for target in adapter.targets:
        if target not in modules:
            linear = ", ".join(sorted(module for module in modules if module.endswith("_proj"))) or "all-linear"
            yield (
                f"policies.{name}.adapter.targets names {target!r}, and {path} has no module of it: write some of {linear}, or "
                "all-linear"
            )


def _batch_problems(name: str, policy: PolicyConfig, recipe: Recipe) -> Iterator[str]:
    batch, group = policy.batch, recipe.rollout.group_size
    played = {recipe.workflow_of(where).name for where in recipe.data.training}
    if not played <= set(ONE_SEQUENCE) or batch.replay.ratio > 0:
        return
    kept, key = (group, "rollout.group_size")
    if batch.resample is not None:
        kept, key = (batch.resample.keep, f"policies.{name}.batch.resample.keep")
    where = f"policies.{name}.batch"
    if batch.size % kept:
        fitting = [size for size in (batch.size // kept * kept, -(-batch.size // kept) * kept) if size]
        yield (
            f"{where}.size is {batch.size}, and a batch takes whole groups of {kept} ({key}): write "
            f"{' or '.join(map(str, fitting))}, or another {key}"
        )
    elif batch.size % batch.minibatches:
        fitting = [number for number in range(1, batch.size + 1) if batch.size % number == 0]
        nearest = sorted(sorted(fitting, key=lambda number: abs(number - batch.minibatches))[:2])
        yield (
            f"{where}.minibatches is {batch.minibatches}, and {where}.size {batch.size} cannot be cut into as many equal parts: "
            f"write {' or '.join(map(str, nearest))}"
        )


def _plan_problems(recipe: Recipe) -> Iterator[str]:
    """Runs that would wait for ever, or do nothing."""
    slots = max(service.num_slots for service in recipe.inference.values()) if recipe.inference else None
    group = recipe.rollout.group_size
    if recipe.run.steps and slots is not None and group > slots:
        yield (
            f"rollout.group_size is {group}, and the largest inference service has {slots} slots (inference.<name>.num_slots): "
            "one replica plays a whole group, so write a smaller group or more slots"
        )
    evaluation = recipe.evaluation
    plays = recipe.data.evaluation and (evaluation.at_start or evaluation.at_end)
    if not recipe.run.steps and not plays:
        yield "run.steps is 0 and no evaluation is played, so the run has nothing to do: write steps, or data.evaluation"
    for place in recipe.modules:
        if not Path(place).is_dir():
            yield f"modules names {place}, which is no directory: correct it, or leave it out"
    smallest = min(policy.model.context_length for policy in recipe.policies.values())
    for name, sampling in evaluation.samplings.items():
        if plays and sampling.max_new_tokens >= smallest:
            yield (
                f"evaluation.samplings.{name}.max_new_tokens ({sampling.max_new_tokens}) leaves no room for a prompt in "
                f"model.context_length ({smallest})"
            )


def _gateway_problems(recipe: Recipe) -> Iterator[str]:
    yield from _unscored_problems(recipe)
    for where, workflow in recipe.workflows().items():
        if workflow.name == BuiltInWorkflow.AGENT_ENV:
            yield from _environment_problems(recipe, where, workflow)
        runs, reward = _runs_programs(where, workflow), _reward_of(where, workflow)
        if recipe.envgateway is None and (runs or reward in tuple(BuiltInReward)):
            default = "" if "reward" in workflow.settings else ", its default"
            asks = f"name is {workflow.name}" if runs else f"settings.reward is {reward!r}{default}"
            yield (
                f"{where}.{asks}, which the environment gateway computes, and envgateway is null: leave envgateway out, or name a "
                "function of yours (package.module:function)"
            )


def _runs_programs(where: str, workflow: WorkflowConfig) -> bool:
    """Whether a built-in workflow has the gateway judge programs, or run them as a tool; a tool by path runs in the replica."""
    with suppress(ConfigError):
        settings: Any = workflow_settings(workflow, where)
        if workflow.name in (BuiltInWorkflow.TOOL_USE, BuiltInWorkflow.TOOL_MATH):
            return settings.format == "code" or any(":" not in tool or tool.startswith(MCP) for tool in settings.tools)
    return workflow.name == BuiltInWorkflow.CODEGEN_VERIFIER


def _reward_of(where: str, workflow: WorkflowConfig) -> str | None:
    """The reward that a workflow names. The default of a user's workflow counts where its module calls ``grade``."""
    with suppress(ConfigError, OSError):  # told by the check of the workflow; a module without source
        reward: str | None = getattr(workflow_settings(workflow, where), "reward", None)
        asks = "reward" in workflow.settings or workflow.name in tuple(BuiltInWorkflow)
        if asks or ".grade(" in inspect.getsource(sys.modules[load_workflow(workflow.name).__module__]):
            return reward
    return None


def _unscored_problems(recipe: Recipe) -> Iterator[str]:
    """Tasks of reasoning-gym that would be graded as math, the default."""
    own = recipe.evaluation.workflow
    for section, config in recipe.data.sections().items():
        where, workflow = "workflow", recipe.workflow
        if config.workflow is not None:
            where, workflow = f"{section}.workflow", config.workflow
        elif not is_training(section) and own is not None:
            where, workflow = "evaluation.workflow", own
        if (
            config.reasoning_gym is None
            or "reward" in workflow.settings
            or _reward_of(where, workflow) != BuiltInReward.MATH
        ):
            continue
        yield (
            f"{section}.reasoning_gym is {config.reasoning_gym}, and {where}.settings has no reward, which is math then: write "
            f"{where}.settings.reward: reasoning_gym for the task's own score"
        )


def _environment_problems(recipe: Recipe, where: str, workflow: WorkflowConfig) -> Iterator[str]:
    gateway, name = recipe.envgateway, workflow.settings.get("environment", BUILT_IN_ENVIRONMENTS[0])
    if gateway is None:
        yield f"{where}.name is {workflow.name}, and envgateway, which holds its environment, is null: leave envgateway out"
    elif name not in (
        known := sorted(
            {*BUILT_IN_ENVIRONMENTS, *gateway.environments, *gateway.agentbench, *gateway.openenv, *gateway.gymnasium}
        )
    ):
        yield (
            f"{where}.settings.environment is {name!r}, which the gateway does not have: write one of {', '.join(known)}, or name "
            "its class under envgateway.environments"
        )


def _directory_problems(recipe: Recipe) -> Iterator[str]:
    place = Path(recipe.run.dir).absolute()
    while not place.exists() and place != place.parent:
        place = place.parent
    if not place.is_dir():
        yield f"run.dir is {recipe.run.dir}, and {place} is a file: name another directory"
        return
    try:
        tempfile.TemporaryDirectory(prefix=".rollmill-check-", dir=place).cleanup()
    except OSError as error:
        yield f"run.dir is {recipe.run.dir}, and {place} cannot be written ({error.strerror}): name another directory"
