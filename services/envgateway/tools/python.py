"""``python`` and ``python_code_with_standard_io``: one program a call, without kept state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from services.common.errors import InfrastructureError
from services.common.telemetry.gateway_queue import Lane
from services.common.text.tool_calls import shown_output, status_of_program
from services.common.tools import ToolResult
from services.envgateway.queue.local import JobQueue
from services.envgateway.sandbox.records import ExecutionLimits, ExecutionRequest

_QUEUE_S = 30.0  # waiting for a slot, on top of a program's own time
_LONGEST_S = 55.0


class PythonTool:
    """Runs a program in the sandbox; the value of a trailing expression is printed, too."""

    timeout_s = None  # the sandbox holds the program's
    concurrency = 1024  # the queue bounds running programs

    def __init__(self, queue: JobQueue, name: str, *, takes_input: bool, wall_s: float) -> None:
        """``wall_s``: of one program, on the wall's clock; the sandbox may allow less."""
        properties: dict[str, Any] = {"code": {"type": "string", "description": "The Python code to execute."}}
        if takes_input:
            properties["input"] = {"type": "string", "description": "What the code reads from standard input."}
        self.name = name
        self.description = "Execute Python code and return what it prints. The value of a trailing expression is printed as in a notebook."
        self.parameters: Mapping[str, Any] = {
            "type": "object", "properties": properties, "required": list(properties)
        }  # fmt: skip
        self._queue = queue
        self._wall_s = wall_s

    async def call(self, arguments: Mapping[str, Any]) -> ToolResult:
        stdin = arguments.get("input", "").encode("utf-8", errors="replace")
        limits = ExecutionLimits(wall_s=self._wall_s)
        request = ExecutionRequest(code=arguments["code"], stdin=stdin, limits=limits, echo=True)
        deadline_s = min(self._wall_s + _QUEUE_S, _LONGEST_S)
        # Without a key: two calls of the same program are two runs.
        result = await self._queue.run(request, lane=Lane.INTERACTIVE, request_id="", deadline_s=deadline_s)
        status = status_of_program(result.status)
        if status is None:
            raise InfrastructureError(f"the sandbox failed: {result.detail or result.status.value}")
        stdout, stderr = (data.decode(errors="replace") for data in (result.stdout, result.stderr))
        text = shown_output(status, stdout, stderr, wall_s=result.wall_s, detail=result.detail)
        return ToolResult(status=status, text=text)
