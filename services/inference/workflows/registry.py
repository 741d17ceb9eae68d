"""Built-in workflows by name, and any other by import path."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pydantic import BaseModel, ValidationError

from services.common.config.base import Section
from services.common.config.data import WorkflowConfig
from services.common.config.explain import explain
from services.common.config.recipe import Recipe
from services.common.errors import ConfigError
from services.common.importing import load_object
from services.common.types import Purpose
from services.inference.workflows.base import Workflow

WORKFLOWS: dict[str, str] = {
    "actor_verifier": "services.inference.workflows.actor_verifier:ActorVerifier",
    "agent_env": "services.inference.workflows.agent_env:AgentEnv",
    "codegen_verifier": "services.inference.workflows.codegen_verifier:CodegenVerifier",
    "external_agent": "services.inference.workflows.external_agent:ExternalAgent",
    "single_turn": "services.inference.workflows.single_turn:SingleTurn",
    "tool_math": "services.inference.workflows.tool_math:ToolMath",
    "tool_use": "services.inference.workflows.tool_use:ToolUse",
}


def load_workflow(name: str) -> type[Workflow]:
    """The class behind a built-in name or an import path; raises ``ConfigError`` saying what to write."""
    path = WORKFLOWS.get(name, name)
    if ":" not in path:
        raise ConfigError(
            f"workflow.name: no workflow {name!r}; write one of {', '.join(WORKFLOWS)}, "
            "or an import path such as my_package.my_module:MyWorkflow"
        )
    found: Any = load_object(path)
    settings = getattr(found, "Settings", None)
    if not (isinstance(settings, type) and issubclass(settings, BaseModel) and hasattr(found, "run")):
        raise ConfigError(
            f"workflow.name: {path} is no workflow: it needs a class attribute `Settings` (a Section) "
            "and `async def run(self, task, context)`; see docs/workflows.md"
        )
    workflow: type[Workflow] = found
    return workflow


def build_workflows(recipe: Recipe) -> dict[Purpose, Workflow]:
    """What a recipe's rollouts are played by, in training and in evaluation, settings checked."""
    training = build_workflow(recipe.workflow)
    _check_policies(training, recipe.compositions(), recipe, "workflow")
    section = recipe.evaluation.workflow
    evaluation = build_workflow(section, "evaluation.workflow") if section else training
    _check_policies(
        evaluation, recipe.evaluation_compositions(), recipe, "evaluation.workflow" if section else "workflow"
    )
    _check_case_time(recipe.workflow, "workflow", recipe)
    if section:
        _check_case_time(section, "evaluation.workflow", recipe)
    for workflow in (training, evaluation):
        check: Callable[[Recipe], None] | None = getattr(workflow, "check", None)
        if check is not None:
            check(recipe)
    return {Purpose.TRAIN: training, Purpose.EVALUATION: evaluation}


def _check_policies(workflow: Workflow, compositions: list[tuple[str, ...]], recipe: Recipe, where: str) -> None:
    """Every policy that a workflow asks for by name must be there in every rollout."""
    names: Callable[[], tuple[str, ...]] | None = getattr(workflow, "policies", None)
    if names is None:
        return
    for composition in compositions:
        present = composition or tuple(recipe.playing_policies)
        for name in names():
            if name not in recipe.policies:
                raise ConfigError(
                    f"{where} {type(workflow).__name__} asks for the policy {name!r}, which this recipe lacks; it has "
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
