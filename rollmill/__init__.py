"""The public interface for users: ``import rollmill``.

The import loads the standard library alone; each name is loaded at its first use, so that a reward needs no torch and a
loss no grpc.

    rollmill.Workflow, Dialogue         how policies and environment make a rollout
    rollmill.tool, Tool                 functions that a policy can call
    rollmill.Environment                a world that the gateway holds
    rollmill.TokenBatch, PolicyLoss     a loss
    rollmill.Engine                     generates tokens
    rollmill.run(recipe), Run(path)     start a run, read its files

A reward is a function ``(task, completion) -> float`` and a data source a generator of rows: they need no class.
"""

from __future__ import annotations

import ast
import importlib
import sys
import warnings
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING, Any

_ROOT = Path(__file__).resolve().parents[1]


def _use_own_services() -> None:
    """Import the package ``services`` that lies beside this one, where the user's folder may have another.

    Raises:
        ImportError: the other one is imported already.
    """
    own = _ROOT / "services"
    loaded = sys.modules.get("services")
    if loaded is not None:
        if own in (Path(place).resolve() for place in loaded.__path__):
            return
        raise ImportError(
            f"rollmill needs its own package `services` ({own}), and another one is imported already "
            f"({list(loaded.__path__)}): give that folder another name, or import rollmill first"
        )
    found = PathFinder.find_spec("services")
    places = [Path(place).resolve() for place in (found.submodule_search_locations or ())] if found else []
    sys.path.insert(0, str(_ROOT))
    try:
        importlib.import_module("services")
    finally:
        sys.path.remove(str(_ROOT))
    if places and own not in places:
        warnings.warn(
            f"{places[0]} is hidden by Rollmill's own package `services`: give the folder another name to import it",
            RuntimeWarning,
            stacklevel=3,
        )


_use_own_services()

if TYPE_CHECKING:  # the list of the public names, which is read at the import
    from rollmill.runs import Rows as Rows
    from rollmill.runs import Run as Run
    from rollmill.runs import run as run
    from services.common.dataset_rows import last_boxed as last_boxed
    from services.common.dataset_rows import truth_in as answer_of  # noqa: F401
    from services.common.errors import ConfigError as ConfigError
    from services.common.errors import InfrastructureError as InfrastructureError
    from services.common.errors import InvalidRequestError as InvalidRequestError
    from services.common.errors import RollmillError as RollmillError
    from services.common.records import Sampling as Sampling
    from services.common.records import StopReason as StopReason
    from services.common.records import Task as Task
    from services.common.tiny import build as tiny_model  # noqa: F401
    from services.common.tools import Tool as Tool
    from services.common.tools import ToolError as ToolError
    from services.common.tools import ToolResult as ToolResult
    from services.common.tools import tool as tool
    from services.envgateway.envs.base import Environment as Environment
    from services.envgateway.envs.base import EnvironmentContext as EnvironmentContext
    from services.envgateway.envs.base import Observation as Observation
    from services.envgateway.envs.base import StepResult as StepResult
    from services.inference.engine.base import GenerationRequest as GenerationRequest
    from services.inference.engine.base import WeightUpdate as WeightUpdate
    from services.inference.engine.streaming import EngineSetup as EngineSetup
    from services.inference.engine.streaming import StreamingEngine as Engine  # noqa: F401
    from services.inference.workflows.base import Conversation as Conversation
    from services.inference.workflows.base import Gateway as Gateway
    from services.inference.workflows.base import Outcome as Outcome
    from services.inference.workflows.base import RewardFunction as RewardFunction
    from services.inference.workflows.base import WorkflowContext as WorkflowContext
    from services.inference.workflows.scripts import Cue as Cue
    from services.inference.workflows.single import Dialogue as Dialogue
    from services.inference.workflows.single import Workflow as Workflow
    from services.inference.workflows.single import WorkflowSettings as WorkflowSettings
    from services.trainer.losses import LossFunction as LossFunction
    from services.trainer.losses import PolicyLoss as PolicyLoss
    from services.trainer.losses import TokenBatch as TokenBatch
    from services.trainer.losses import log_ratio as log_ratio
    from services.trainer.losses import masked as masked

# "package.module:name" of each of them
_WHERE = {
    str(alias.asname): f"{node.module}:{alias.name}"
    for node in ast.walk(ast.parse(Path(__file__).read_text(encoding="utf-8")))
    if isinstance(node, ast.ImportFrom) and node.col_offset
    for alias in node.names
}

__all__ = sorted(_WHERE)


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"rollmill has no {name!r}; it has {', '.join(__all__)}")
    module, _, attribute = _WHERE[name].partition(":")
    found = globals()[name] = getattr(importlib.import_module(module), attribute)
    return found


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
