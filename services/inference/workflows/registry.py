"""Built-in workflows by name, and any other by import path."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ValidationError

from services.common.config.base import Section
from services.common.config.explain import explain
from services.common.config.services import WorkflowConfig
from services.common.errors import ConfigError
from services.common.importing import load_object
from services.inference.workflows.base import Workflow

WORKFLOWS: dict[str, str] = {
    "actor_verifier": "services.inference.workflows.actor_verifier:ActorVerifier",
    "agent_env": "services.inference.workflows.agent_env:AgentEnv",
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


def workflow_settings(config: WorkflowConfig) -> Section:
    """The settings of a recipe's workflow, checked and with their defaults."""
    settings = load_workflow(config.name).Settings
    try:
        return settings.model_validate(config.settings)
    except ValidationError as error:
        lines = explain(error, settings)
        raise ConfigError("\n".join(f"workflow.settings.{line}" for line in lines)) from None


def build_workflow(config: WorkflowConfig) -> Workflow:
    """The workflow of a recipe, its settings checked."""
    return load_workflow(config.name)(workflow_settings(config))
