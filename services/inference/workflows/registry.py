"""Loads workflows: built-in ones by name, others by import path."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pydantic import BaseModel, ValidationError

from services.common.config.base import Section
from services.common.config.data import WorkflowConfig, is_training, name_of
from services.common.config.loading import explain
from services.common.config.recipe import Recipe
from services.common.dataset_rows import BuiltInWorkflow
from services.common.errors import ConfigError
from services.common.extras import absent, provided
from services.common.importing import check_methods, load_object, place_of
from services.common.records import PlayedBy, Purpose
from services.inference.workflows.base import Workflow

WORKFLOWS: dict[str, str] = {
    BuiltInWorkflow.ACTOR_VERIFIER: "services.inference.workflows.single:ActorVerifier",
    BuiltInWorkflow.AGENT_ENV: "services.inference.workflows.single:AgentEnv",
    BuiltInWorkflow.CODEGEN_VERIFIER: "services.inference.workflows.codegen:CodegenVerifier",
    BuiltInWorkflow.EXTERNAL_AGENT: "services.inference.workflows.external_agent:ExternalAgent",
    BuiltInWorkflow.SINGLE_TURN: "services.inference.workflows.single:SingleTurn",
    BuiltInWorkflow.TOOL_MATH: "services.inference.workflows.tools:ToolMath",
    BuiltInWorkflow.TOOL_USE: "services.inference.workflows.tools:ToolUse",
}


def load_workflow(name: str) -> type[Workflow]:
    """The class behind a built-in name or an import path; raises ``ConfigError``; the message names the remedy."""
    path = {**WORKFLOWS, **provided("workflows")}.get(name, name)
    if name == BuiltInWorkflow.VERIFIERS == path:
        raise ConfigError(f"workflow.name: {absent('workflows', name)}")
    if ":" not in path:
        raise ConfigError(
            f"workflow.name: no workflow {name!r}; write one of {', '.join(sorted({*WORKFLOWS, *provided('workflows')}))}, "
            "or an import path such as my_package.my_module:MyWorkflow"
        )
    found: Any = load_object(path)
    settings = getattr(found, "Settings", None)
    if not (isinstance(settings, type) and issubclass(settings, BaseModel)):
        raise ConfigError(
            f"{place_of(found)}workflow.name: {path} is no workflow: write a class `class {path.rpartition(':')[2]}"
            "(rollmill.Workflow)` with `async def run(self, task, context)`; see docs/workflows.md"
        )
    check_methods(found, f"workflow.name: {path}", {"run": "async def run(self, task, context) -> Outcome"})
    workflow: type[Workflow] = found
    return workflow


def build_workflows(recipe: Recipe) -> dict[PlayedBy, Workflow]:
    """The workflows of a recipe with validated settings: for training and evaluation, and those that datasets have of
    their own."""
    training = _built(recipe, recipe.workflow, "workflow", Purpose.TRAIN)
    section = recipe.evaluation.workflow
    if section:
        evaluation = _built(recipe, section, "evaluation.workflow", Purpose.EVALUATION)
    else:
        evaluation = training
        _check_policies(evaluation, recipe.evaluation_compositions(), recipe, "workflow")
    found: dict[PlayedBy, Workflow] = {Purpose.TRAIN: training, Purpose.EVALUATION: evaluation}
    for where, config in recipe.data.sections().items():
        if config.workflow is not None:
            purpose = Purpose.TRAIN if is_training(where) else Purpose.EVALUATION
            found[purpose, name_of(where)] = _built(recipe, config.workflow, f"{where}.workflow", purpose)
    _check_all_play(found, recipe)
    return found


def _check_all_play(workflows: dict[PlayedBy, Workflow], recipe: Recipe) -> None:
    """Refuse a policy whose trainer would wait for ever: each workflow of training names its policies, and none names it."""
    training = [workflow for key, workflow in workflows.items() if Purpose.TRAIN in (key, key[0])]
    named = [tuple(getattr(workflow, "policies", tuple)()) for workflow in training]
    idle = set(recipe.trained_policies).difference(*named) if all(named) and recipe.run.steps else set()
    if idle:
        raise ConfigError(
            f"no workflow of training plays the policy {', '.join(sorted(idle))}, so its trainer would wait for ever: "
            "name it in workflow.settings, or remove it from policies"
        )


def _built(recipe: Recipe, config: WorkflowConfig, where: str, purpose: Purpose) -> Workflow:
    """A workflow that passes the checks of its purpose."""
    workflow = build_workflow(config, where)
    compositions = recipe.compositions() if purpose is Purpose.TRAIN else recipe.evaluation_compositions()
    _check_policies(workflow, compositions, recipe, where)
    _check_case_time(config, where, recipe)
    check: Callable[[Recipe], None] | None = getattr(workflow, "check", None)
    if check is not None:
        check(recipe)
    return workflow


def _check_policies(workflow: Workflow, compositions: list[tuple[str, ...]], recipe: Recipe, where: str) -> None:
    """Check that every policy that a workflow uses by name takes part in every rollout."""
    names: Callable[[], tuple[str, ...]] | None = getattr(workflow, "policies", None)
    if names is None:
        return
    for composition in compositions:
        present = composition or tuple(recipe.playing_policies)
        for name in names():
            if name not in recipe.policies:
                raise ConfigError(
                    f"{where} {type(workflow).__name__} asks for the policy {name!r}, which this recipe lacks; known are "
                    f"{', '.join(recipe.policies)}: name one of them in {where}.settings, or add policies.{name}"
                )
            if name not in present:
                raise ConfigError(
                    f"{where} {type(workflow).__name__} asks for the policy {name!r}, but its rollouts are played by "
                    f"{', '.join(present)} alone (rollout.policies or evaluation.policies)"
                )


def _check_case_time(config: WorkflowConfig, where: str, recipe: Recipe) -> None:
    """Refuses a workflow whose ``case_time_s`` is longer than the recipe's sandbox lets a program run."""
    case_time_s = getattr(workflow_settings(config, where), "case_time_s", None)
    if case_time_s is None or recipe.envgateway is None:
        return
    try:
        recipe.envgateway.sandbox.check_case_time(f"{where}.settings.case_time_s", case_time_s)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def workflow_settings(config: WorkflowConfig, where: str = "workflow") -> Section:
    """The settings of a workflow, checked and with their defaults; ``where`` names the section in errors."""
    settings = load_workflow(config.name).Settings
    try:
        return settings.model_validate(config.settings)
    except ValidationError as error:
        lines = explain(error, settings)
        raise ConfigError("\n".join(f"{where}.settings.{line}" for line in lines)) from None


def build_workflow(config: WorkflowConfig, where: str = "workflow") -> Workflow:
    """One workflow, its settings checked; ``where`` names the section in errors."""
    return load_workflow(config.name)(workflow_settings(config, where))
