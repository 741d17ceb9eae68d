"""Built-in scripts by the workflow that they are for, and any other by import path."""

from __future__ import annotations

from services.common.config.services import ForcedEngineConfig, WorkflowConfig
from services.common.errors import ConfigError
from services.common.importing import load_object
from services.inference.scripts.base import ScriptBook
from services.inference.workflows.registry import workflow_settings

SCRIPTS: dict[str, str] = {
    "actor_verifier": "services.inference.scripts.checkers:solve_and_verify",
    "agent_env": "services.inference.scripts.episodes:act",
    "codegen_verifier": "services.inference.scripts.checkers:write_and_test",
    "single_turn": "services.inference.scripts.single_turn:speak",
    "tool_math": "services.inference.scripts.tools:call_and_answer",
    "tool_use": "services.inference.scripts.tools:call_and_answer",
}


def load_script(config: ForcedEngineConfig, workflow: WorkflowConfig, seed: int) -> ScriptBook:
    """The script of a recipe's forced engine; ``ConfigError`` says what to write when there is none."""
    name = config.script or workflow.name
    path = SCRIPTS.get(name, name)
    if ":" not in path or (config.script is None and name not in SCRIPTS):
        raise ConfigError(
            f"inference.<name>.forced.script: there is no script for {name!r}; write one of {', '.join(SCRIPTS)}, or the "
            "import path of a function from a Cue (services.inference.scripts.base) to text"
        )
    script = load_object(path)
    if not callable(script):
        raise ConfigError(f"inference.<name>.forced.script: {path} is no function of a Cue")
    return ScriptBook(
        script=script,
        settings=workflow_settings(workflow),
        right_share=config.right_share,
        num_words=config.num_words,
        seed=seed + config.seed,
    )
