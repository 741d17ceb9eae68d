"""The tools that every gateway has."""

from __future__ import annotations

from services.common.config.processes.envgateway import EnvGatewayConfig, ToolConfig
from services.envgateway.queue.base import JobQueue
from services.envgateway.sandbox.live import LiveSlots
from services.envgateway.tools.base import AnyTool
from services.envgateway.tools.jupyter import JupyterTool
from services.envgateway.tools.python import PythonTool

_WITH_INPUT = {"python": False, "python_code_with_standard_io": True}


def built_in_tools(config: EnvGatewayConfig, queue: JobQueue, live: LiveSlots) -> list[AnyTool]:
    """Built-in tools with time-outs from the sandbox's limits."""
    limits = config.tools.limits
    tools: list[AnyTool] = [
        PythonTool(
            queue,
            name,
            takes_input=takes_input,
            wall_s=limits.get(name, ToolConfig()).timeout_s or config.sandbox.wall_time_s,
        )
        for name, takes_input in _WITH_INPUT.items()
    ]
    cell_time_s = limits.get(JupyterTool.name, ToolConfig()).timeout_s or config.tools.jupyter.cell_time_s
    jupyter = config.tools.jupyter.model_copy(update={"cell_time_s": cell_time_s})
    return [*tools, JupyterTool(live, jupyter, config.sandbox.num_slots)]
