"""Lists the public names of the package ``rollmill``, each with its place of definition.

The only such table: ``rollmill`` reads the names here, and so does the error about an old import path.
"""

from __future__ import annotations

PUBLIC: dict[str, str] = {
    # tasks and what comes of them
    "Task": "services.common.records.types:Task",
    "Outcome": "services.inference.workflows.base:Outcome",
    "StopReason": "services.common.records.types:StopReason",
    "Sampling": "services.common.records.types:Sampling",
    # workflows
    "Workflow": "services.inference.workflows.custom:Workflow",
    "WorkflowSettings": "services.inference.workflows.custom:WorkflowSettings",
    "WorkflowContext": "services.inference.workflows.base:WorkflowContext",
    "Dialogue": "services.inference.workflows.custom:Dialogue",
    "Conversation": "services.inference.workflows.conversation:Conversation",
    "Gateway": "services.inference.workflows.base:Gateway",
    # rewards
    "RewardFunction": "services.inference.workflows.rewards:RewardFunction",
    "answer_of": "services.common.records.dataset_rows:truth_in",
    "last_boxed": "services.common.records.dataset_rows:last_boxed",
    # tools
    "tool": "services.common.tools:tool",
    "Tool": "services.common.tools:Tool",
    "ToolResult": "services.common.tools:ToolResult",
    "ToolError": "services.common.tools:ToolError",
    # environments
    "Environment": "services.envgateway.envs.custom:Environment",
    "EnvironmentContext": "services.envgateway.envs.base:EnvironmentContext",
    "Observation": "services.envgateway.envs.base:Observation",
    "StepResult": "services.envgateway.envs.base:StepResult",
    # losses
    "LossFunction": "services.trainer.algorithms.base:LossFunction",
    "TokenBatch": "services.trainer.algorithms.base:TokenBatch",
    "PolicyLoss": "services.trainer.algorithms.base:PolicyLoss",
    "log_ratio": "services.trainer.algorithms.base:log_ratio",
    "masked": "services.trainer.algorithms.base:masked",
    # engines
    "Engine": "services.inference.engine.streaming:StreamingEngine",
    "EngineSetup": "services.inference.engine.streaming:EngineSetup",
    "GenerationRequest": "services.inference.engine.base:GenerationRequest",
    "WeightUpdate": "services.inference.engine.weight_update:WeightUpdate",
    "Cue": "services.inference.scripts.base:Cue",
    # models
    "tiny_model": "services.common.tiny.models:build",
    # errors
    "RollmillError": "services.common.errors:RollmillError",
    "ConfigError": "services.common.errors:ConfigError",
    "InfrastructureError": "services.common.errors:InfrastructureError",
    "InvalidRequestError": "services.common.errors:InvalidRequestError",
}

_OTHER_NAMES = {"UserEnvironment": "Environment", "truth_in": "answer_of", "boxed_match": "last_boxed"}


def new_name(path: str) -> str:
    """The public name for ``services.some.module:name``, or None."""
    name = path.partition(":")[2].partition(".")[0]
    same = next((public for public, where in PUBLIC.items() if where == path), None)
    public = same or (name if name in PUBLIC else _OTHER_NAMES.get(name))
    if public:
        return f"write rollmill:{public}"
    return (
        "built-in workflows, rewards, tools and environments go by their plain names, such as tool_use; anything else of "
        "`services` may change at any time: copy it into a module of yours, which imports `rollmill` (docs/reference)"
    )
