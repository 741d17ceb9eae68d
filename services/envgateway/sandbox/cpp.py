"""C++: compiles a program once in the sandbox, and runs the binary as often as asked."""

from __future__ import annotations

from services.envgateway.sandbox.bare.statuses import RunStatus
from services.envgateway.sandbox.jobs import Job
from services.envgateway.sandbox.lease import SlotLease
from services.envgateway.sandbox.records import ExecutionRequest, ExecutionResult

_MESSAGE_BYTES = 16_384
_ARTEFACT_BYTES = 32 << 20
_PROCESSES = 16
_COMPILER_LIMITS = {
    RunStatus.TIME_LIMIT: "the compiler took too long",
    RunStatus.MEMORY_LIMIT: "the compiler used too much memory",
    RunStatus.OUTPUT_LIMIT: "the compiler printed too much, or its program is too large",
}


async def compile_cpp(slot: SlotLease, code: str) -> bytes | ExecutionResult:
    """The program, or why there is none: COMPILE_ERROR, INVALID_REQUEST without a compiler, INFRA_ERROR."""
    if not slot.has_cpp:
        detail = "this gateway has no C++ compiler (g++); it runs python"
        return ExecutionResult(status=RunStatus.INVALID_REQUEST, detail=detail)
    config = slot.config
    limits: dict[str, float | int] = {
        "wall_s": config.compile_time_s,
        "cpu_s": config.compile_time_s,
        "memory_bytes": config.compile_memory_bytes,
        "processes": _PROCESSES,
        "output_bytes": _MESSAGE_BYTES,
        "answer_bytes": _ARTEFACT_BYTES,
        "file_bytes": _ARTEFACT_BYTES,
        "open_files": 64,
        "disk_bytes": 4 * _ARTEFACT_BYTES,
        "num_files": 256,
    }
    run = await slot.run(Job(mode="compile", profile="native", source=code.encode(), limits=limits))
    result = run.result.result()
    if result.status is RunStatus.OK:
        return run.answer
    if result.status in (RunStatus.INFRA_ERROR, RunStatus.CANCELLED):
        return result
    return ExecutionResult(
        status=RunStatus.COMPILE_ERROR,
        stderr=result.stderr,
        truncated=result.truncated,
        wall_s=result.wall_s,
        cpu_s=result.cpu_s,
        peak_memory_bytes=result.peak_memory_bytes,
        tier=result.tier,
        detail=_COMPILER_LIMITS.get(result.status, "the program does not compile"),
    )


def cpp_job(artefact: bytes, stdin: bytes, limits: dict[str, float | int]) -> Job:
    """One run of a compiled program."""
    return Job(mode="binary", profile="native", source=artefact, stdin=stdin, limits=limits)


async def run_cpp(slot: SlotLease, request: ExecutionRequest) -> ExecutionResult:
    artefact = await compile_cpp(slot, request.code)
    if isinstance(artefact, ExecutionResult):
        return artefact
    return (await slot.run(cpp_job(artefact, request.stdin, request.limits.within(slot.config)))).result.result()
