"""Built-in scripts by the workflow that they are for, and any other by import path."""

from __future__ import annotations

from services.common.config.data import WorkflowConfig
from services.common.config.recipe import Recipe
from services.common.config.services import ForcedEngineConfig
from services.common.errors import ConfigError
from services.common.importing import load_object
from services.common.types import Purpose
from services.inference.scripts.base import Part, ScriptBook
from services.inference.workflows.registry import workflow_settings

SCRIPTS: dict[str, str] = {
    "actor_verifier": "services.inference.scripts.checkers:solve_and_verify",
    "agent_env": "services.inference.scripts.episodes:act",
    "codegen_verifier": "services.inference.scripts.checkers:write_and_test",
    "external_agent": "services.inference.scripts.single_turn:speak",
    "single_turn": "services.inference.scripts.single_turn:speak",
    "tool_math": "services.inference.scripts.tools:call_and_answer",
    "tool_use": "services.inference.scripts.tools:call_and_answer",
}


def load_scripts(config: ForcedEngineConfig, recipe: Recipe) -> ScriptBook:
    """The scripts of a recipe's forced engine; ``ConfigError`` says what to write when there is none.

    A workflow of its own in evaluation is played by its own built-in script, where it has one.
    """
    training = _part(config.script, recipe.workflow, "workflow")
    evaluation = training
    if (section := recipe.evaluation.workflow) is not None:
        evaluation = _part(None if section.name in SCRIPTS else config.script, section, "evaluation.workflow")
    return ScriptBook(
        parts={Purpose.TRAIN: training, Purpose.EVALUATION: evaluation},
        right_share=config.right_share,
        num_words=config.num_words,
        seed=recipe.run.seed + config.seed,
    )


def _part(name: str | None, workflow: WorkflowConfig, where: str) -> Part:
    path = SCRIPTS.get(name or workflow.name, name or "")
    if ":" not in path:
        raise ConfigError(
            f"inference.<name>.forced.script: there is no script for {name or workflow.name!r} ({where}); write one of "
            f"{', '.join(SCRIPTS)}, or the import path of a function from a Cue (services.inference.scripts.base) to text"
        )
    script = load_object(path)
    if not callable(script):
        raise ConfigError(f"inference.<name>.forced.script: {path} is no function of a Cue")
    return Part(script=script, settings=workflow_settings(workflow, where))
