"""``jupyter_code``: a process per trajectory that keeps what its cells define.

The process starts with the first call and ends with the trajectory. A cell that raises shows its traceback and leaves
the process as it is; one that takes too long or prints too much is interrupted; a cell that cannot be interrupted, or
uses too much memory, is killed with its process, and the next call reports a fresh process. All live processes of the
gateway taken is ``CapacityError``: the call did not happen.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from services.common.config.envgateway import EnvGatewayConfig, LiveConfig
from services.common.dataset_rows import BuiltInTool
from services.common.errors import InfrastructureError
from services.common.telemetry.metrics import Lane
from services.common.text.tools import ToolStatus, shown_output, status_of_program
from services.common.tools import JupyterDescription, PythonDescription, ToolResult
from services.envgateway.queue import JobQueue
from services.envgateway.sandbox.bare.statuses import RunStatus
from services.envgateway.sandbox.lease import why_unusable
from services.envgateway.sandbox.live import CellResult, LiveProcess
from services.envgateway.sandbox.pool import LiveSlots
from services.envgateway.sandbox.records import ExecutionLimits, ExecutionRequest

# --- Tools of the gateway: those of ``services.common.tools``, and the error of a state that is lost.


class StateLostError(InfrastructureError):
    """The machinery has lost a trajectory's tool state: a repeated call does not restore the state."""


# --- ``python`` and ``python_code_with_standard_io``: one program a call, without kept state.


_QUEUE_S = 30.0  # waiting for a slot, on top of a program's own time
_LONGEST_S = 55.0


class PythonTool(PythonDescription):
    """Runs a program in the sandbox; the value of a trailing expression is printed, too."""

    concurrency = 1024  # the queue bounds running programs

    def __init__(self, queue: JobQueue, wall_s: float) -> None:
        """``wall_s``: of one program, on the wall's clock; the sandbox may allow less."""
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


class PythonWithoutInput(PythonTool):
    name = BuiltInTool.PYTHON.value
    parameters: Mapping[str, Any] = {
        "type": "object",
        "properties": {"code": PythonDescription.properties["code"]},
        "required": ["code"],
    }


_WHY = {
    ToolStatus.TIME_LIMIT: "its time was over",
    ToolStatus.MEMORY_LIMIT: "it used too much memory",
    ToolStatus.OUTPUT_LIMIT: "it printed too much",
}


class JupyterTool(JupyterDescription):
    """The tool that all trajectories share; each opens a notebook of its own."""

    def __init__(self, slots: LiveSlots, config: LiveConfig, concurrency: int) -> None:
        """``concurrency``: cells that run at once, over all trajectories."""
        self.concurrency = concurrency
        self._slots = slots
        self._config = config

    def open(self) -> Notebook:
        return Notebook(self._slots, self._config)


class Notebook:
    """One trajectory's process, started at the first call and again after a death that its code caused."""

    def __init__(self, slots: LiveSlots, config: LiveConfig) -> None:
        self._slots = slots
        self._config = config
        self._process: LiveProcess | None = None
        self._has_state = False
        self._lost = ""  # why earlier definitions are gone through their own code, until reported
        self._broken = ""  # why they are gone through no fault of the code: the state cannot be restored

    async def call(self, arguments: Mapping[str, Any]) -> ToolResult:
        """Run one cell.

        Raises:
            CapacityError: all live processes are in use.
            StateLostError: the machinery has lost the definitions of earlier cells.
            InfrastructureError: the machinery failed before the first definition.
        """
        code = arguments["code"]
        unusable = why_unusable(code)
        if unusable:
            return ToolResult(status=ToolStatus.INVALID_ARGUMENTS, text=f"Error: {unusable}")
        await self._notice_an_end()
        if self._broken:
            raise StateLostError(self._broken)
        if self._process is None:
            self._process = await LiveProcess.start(self._slots, self._config, code)
        result = await self._process.run(code)
        status = self._status(result.status, result.detail)
        lost, self._lost = self._lost, ""
        self._has_state = result.alive
        if not result.alive:
            self._forget(_WHY.get(status, result.detail))
        return ToolResult(status=status, text=_shown(result, status, lost))

    async def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            await process.close()

    async def _notice_an_end(self) -> None:
        """The process may have ended since the last call: a limit of its life, a thread that left."""
        ended = self._process.ended if self._process is not None else None
        if ended is not None:
            await self.close()
            status = self._status(ended.status, ended.detail)
            self._forget(_WHY.get(status, ended.detail or "it ended between two calls"))

    def _status(self, status: RunStatus, detail: str) -> ToolStatus:
        known = status_of_program(status)
        if known is not None:
            return known
        self._process = None
        if self._has_state:
            self._broken = f"the process of jupyter_code was lost: {detail or status.value}"
            raise StateLostError(self._broken)
        raise InfrastructureError(f"the sandbox failed: {detail or status.value}")

    def _forget(self, why: str) -> None:
        self._process = None
        self._has_state = False
        self._lost = why


def _shown(result: CellResult, status: ToolStatus, lost: str) -> str:
    stdout, stderr = (data.decode(errors="replace") for data in (result.stdout, result.stderr))
    if result.alive:
        text = shown_output(status, stdout, stderr, wall_s=result.wall_s)
    else:
        told = "\n".join(part for part in (stderr.rstrip(), f"Error: {result.detail}") if part)
        text = shown_output(status, stdout, told, wall_s=result.wall_s)
        text += "\n(the process was ended; what earlier cells defined is gone)"
    return f"(a fresh process, without what earlier cells defined: {lost})\n{text}" if lost else text


def built_in_tools(config: EnvGatewayConfig, queue: JobQueue, live: LiveSlots) -> list[Any]:
    """Built-in tools with time-outs from the sandbox's limits."""
    wall_s = config.sandbox.wall_time_s
    return [
        PythonWithoutInput(queue, wall_s),
        PythonTool(queue, wall_s),
        JupyterTool(live, config.tools.jupyter, config.sandbox.num_slots),
    ]
