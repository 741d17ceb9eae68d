"""Runs an agent that is a separate program: starts the program, passes the task, waits for the end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from services.common.security.bundle import without_keys
from services.common.system.child import bound_to_this_process
from services.common.system.children import end_group, exited, process_group

_KEPT_BYTES = 64 * 1024  # of the end of each output
_LINE_BYTES = 16 * 1024
_SHOWN_CHARACTERS = 2000
_LAST_OUTPUT_S = 1.0  # after its end, for programs that write its output, such as tee
_LOOK_S = 0.05  # between two looks at whether it has ended


class AgentFailedError(RuntimeError):
    """The agent failed, not the infrastructure: the rollout is a failure without a retry."""


async def run_command(
    command: Sequence[str], task: Mapping[str, Any], base_url: str, session: str, seeds: Mapping[str, int]
) -> float | None:
    """The reward that the program prints as its last line, ``{"reward": 1.0}``, or None. Raises ``AgentFailedError``.

    The end of the program, and a cancellation, end all its child processes; the kernel ends the program with this process.
    """
    environment = {
        **without_keys(os.environ),
        "OPENAI_BASE_URL": base_url,
        "OPENAI_API_KEY": session,  # the session, for clients that send no other header
        "ANTHROPIC_BASE_URL": base_url.removesuffix("/v1"),  # its client adds /v1
        "ANTHROPIC_API_KEY": session,
        "ROLLMILL_SESSION": session,
        **{f"ROLLMILL_{name.upper()}": str(seed) for name, seed in seeds.items()},
    }
    if shutil.which(command[0]) is None:
        raise AgentFailedError(f"the agent {command[0]} cannot be started: there is no such program")
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), asyncio.subprocess.PIPE)
    async with process_group(*bound_to_this_process(command), env=environment, **pipes) as process:
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        async with asyncio.TaskGroup() as group:
            group.create_task(_tell(process.stdin, orjson.dumps(dict(task)) + b"\n"))
            out = group.create_task(_end_of(process.stdout))
            err = group.create_task(_end_of(process.stderr))
            code = await exited(process, _LOOK_S)
            await asyncio.wait({out, err}, timeout=_LAST_OUTPUT_S)
            await end_group(process)  # servers that it leaves behind would keep the outputs open
    if code:
        said = err.result().decode(errors="replace").strip()[-_SHOWN_CHARACTERS:]
        raise AgentFailedError(f"the agent {command[0]} ended with code {code}: {said or 'no error output'}")
    return _reward_in(out.result())


def _reward_in(output: bytes) -> float | None:
    lines = output.strip().splitlines()
    try:
        last = orjson.loads(lines[-1]) if lines else None
    except ValueError:
        return None
    reward = last.get("reward") if isinstance(last, dict) else None
    return float(reward) if isinstance(reward, (int, float)) else None


async def _tell(pipe: asyncio.StreamWriter, text: bytes) -> None:
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # a program may ignore its task
        pipe.write(text)
        await pipe.drain()
        pipe.close()


async def _end_of(pipe: asyncio.StreamReader) -> bytes:
    kept = b""
    while piece := await pipe.read(_LINE_BYTES):
        kept = (kept + piece)[-_KEPT_BYTES:]
    return kept
