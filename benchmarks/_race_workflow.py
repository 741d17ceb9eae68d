"""``tool_use`` with programs in the replica's own process, without a sandbox: for the race in process."""

from __future__ import annotations

from benchmarks._race_programs import run_tool
from services.common.text.tools import MalformedCall, ToolStatus
from services.common.tools import ToolResult, ToolSession
from services.inference.workflows.base import Gateway
from services.inference.workflows.tools import ToolUse


class InProcessToolUse(ToolUse):
    async def _answer(self, content: str | MalformedCall, gateway: Gateway, tools: ToolSession) -> ToolResult:
        if isinstance(content, MalformedCall):
            return await super()._answer(content, gateway, tools)
        tools.statistics.count(ToolStatus.OK, 0.0)
        return ToolResult(text=run_tool(content.strip()), status=ToolStatus.OK)
