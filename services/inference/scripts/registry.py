"""Loads scripts: built-in ones by their workflow, others by import path."""

from __future__ import annotations

from services.common.config.data import WorkflowConfig, is_training, name_of
from services.common.config.processes.services import ForcedEngineConfig
from services.common.config.recipe import Recipe
from services.common.errors import ConfigError
from services.common.importing import load_object
from services.common.records.dataset_rows import BuiltInWorkflow
from services.common.records.types import PlayedBy, Purpose
from services.common.user_code import check_call
from services.inference.scripts.base import Part, ScriptBook
from services.inference.workflows.registry import workflow_settings

SCRIPTS: dict[str, str] = {
    BuiltInWorkflow.ACTOR_VERIFIER: "services.inference.scripts.checkers:solve_and_verify",
    BuiltInWorkflow.AGENT_ENV: "services.inference.scripts.episodes:act",
    BuiltInWorkflow.CODEGEN_VERIFIER: "services.inference.scripts.checkers:write_and_test",
    BuiltInWorkflow.EXTERNAL_AGENT: "services.inference.scripts.tools:call_and_answer",
    BuiltInWorkflow.SINGLE_TURN: "services.inference.scripts.answers:speak",
    BuiltInWorkflow.TOOL_MATH: "services.inference.scripts.tools:call_and_answer",
    BuiltInWorkflow.TOOL_USE: "services.inference.scripts.tools:call_and_answer",
    BuiltInWorkflow.VERIFIERS: "services.inference.scripts.tools:call_and_answer",
}


def load_scripts(config: ForcedEngineConfig, recipe: Recipe) -> ScriptBook:
    """The scripts of a recipe's replay engine; ``ConfigError`` names the remedy if there is none.

    A separate evaluation workflow uses its own built-in script, if there is one; so does a dataset with another workflow.
    """
    training = _part(config.script, recipe.workflow, "workflow")
    evaluation = training
    if (section := recipe.evaluation.workflow) is not None:
        evaluation = _part(None if section.name in SCRIPTS else config.script, section, "evaluation.workflow")
    parts: dict[PlayedBy, Part] = {Purpose.TRAIN: training, Purpose.EVALUATION: evaluation}
    for where, dataset in recipe.data.sections().items():
        if (own := dataset.workflow) is not None:
            purpose = Purpose.TRAIN if is_training(where) else Purpose.EVALUATION
            name = None if own.name in SCRIPTS and own.name != recipe.workflow.name else config.script
            parts[purpose, name_of(where)] = _part(name, own, f"{where}.workflow")
    return ScriptBook(
        parts=parts,
        right_share=config.right_share,
        num_words=config.num_words,
        seed=recipe.run.seed + config.seed,
    )


def _part(name: str | None, workflow: WorkflowConfig, where: str) -> Part:
    path = SCRIPTS.get(name or workflow.name, name or "")
    if ":" not in path:
        raise ConfigError(
            f"inference.<name>.forced.script: there is no script for {name or workflow.name!r} ({where}); write one of "
            f"{', '.join(SCRIPTS)}, or the import path of a function from a rollmill.Cue to text"
        )
    script = load_object(path)
    check_call(script, f"inference.<name>.forced.script: {path}", "def script(cue) -> str", "cue")
    return Part(script=script, settings=workflow_settings(workflow, where))
