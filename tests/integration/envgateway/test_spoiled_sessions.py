"""A kept session that spoils its own process costs its trajectory that process at most, and affects no neighbour."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from services.common.config.envgateway import LiveConfig, SandboxConfig
from services.common.errors import CapacityError
from services.common.text.tools import ToolCall, ToolStatus
from services.envgateway.sandbox.pool import SandboxPool
from services.envgateway.tools.registry import GatewayToolSession, ToolBox
from services.envgateway.tools.tools import JupyterTool
from tests.integration.envgateway.conftest import CONFIG
from tests.integration.envgateway.sandbox_state import assert_clean
from tests.waiting import accepted, until

_SANDBOX: SandboxConfig = CONFIG.model_copy(update={"num_live": 4})
_LIVE = LiveConfig(cell_time_s=1.5, cpu_time_s=20.0, lifetime_s=60.0, memory_bytes=96 << 20, output_bytes=10_000)
_NUM_NEIGHBOURS = 3

_BEGIN = "import os\nnumber = {}\nfile = open('kept', 'w+')\n_ = file.write(str(number))\nfile.flush()"
_LOOK = """
number += 1
number -= file.seek(0) + 1
free = os.dup(0)
os.close(free)
(number, file.read(), os.listdir(), free < 16)
"""

_SPOILS = {
    "state of the interpreter": "import builtins, sys\nbuiltins.print = builtins.len = builtins.__import__ = None\nsys.modules.clear()",
    "its streams": "import sys\nsys.stdout = sys.stderr = sys.__stdout__ = None",
    "a collector and limits": (
        "import gc, sys, resource\ngc.disable()\nsys.setrecursionlimit(60)\nresource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))"
    ),
    "all descriptors closed": "import os\nos.closerange(0, 64)",
    "all descriptors taken": "import os\nkept = []\nwhile True: kept.append(os.open('.', os.O_RDONLY))",
    "a wrong descriptor": "import os\n[os.dup2(1, fd) for fd in range(3, 9)]",
    "memory": "kept = []\nwhile True: kept.append(bytearray(1 << 20))",
    "memory of the heap itself": "import ctypes\nctypes.memset(id(None), 255, 16)",
    "signals ignored": (
        "import signal\nfor number in range(1, 32):\n    try: signal.signal(number, signal.SIG_IGN)\n    except OSError: pass\nwhile True: pass"
    ),
    "signals blocked": "import signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))\nwhile True: pass",
    "signals to all": "import os\nfor pid in (-1, 0, 1, os.getppid()):\n    try: os.kill(pid, 9)\n    except OSError: pass",
    "threads that spin": (
        "import threading\ndef spin():\n    while True: pass\nfor _ in range(6): threading.Thread(target=spin, daemon=True).start()"
    ),
    "processes that stay": "import os, time\nfor _ in range(4):\n    if not os.fork():\n        time.sleep(60)",
    "its directory": "import os\nos.makedirs('a/b')\nos.chdir('a/b')\nos.rmdir('../b')\nos.umask(0o777)",
    "its priority": "import os\nos.nice(19)\nos.sched_setaffinity(0, {min(os.sched_getaffinity(0))})",
}


@pytest.fixture
async def spoilable() -> AsyncIterator[SandboxPool]:
    pool = SandboxPool.start_before_threads(_SANDBOX)
    yield pool
    await pool.close()


async def _ran(session: GatewayToolSession, code: str) -> tuple[ToolStatus, str]:
    result = await session.answer(ToolCall(name=JupyterTool.name, arguments={"code": code}))
    return result.status, result.text


async def _with_a_place(session: GatewayToolSession, code: str) -> tuple[ToolStatus, str]:
    """The place of the session before is free when no process of the session is left, a moment after its close."""
    return await accepted(lambda: _ran(session, code), CapacityError)


async def test_a_session_that_spoils_its_process_does_not_affect_its_neighbours(spoilable: SandboxPool) -> None:
    box = ToolBox([JupyterTool(spoilable.live, _LIVE, 4)])
    neighbours = [GatewayToolSession(box, [JupyterTool.name]) for _ in range(_NUM_NEIGHBOURS)]
    for number, neighbour in enumerate(neighbours):
        assert (await _ran(neighbour, _BEGIN.format(number)))[0] is ToolStatus.OK
    for spoil, code in _SPOILS.items():
        spoiled = GatewayToolSession(box, [JupyterTool.name])
        status, text = await _with_a_place(spoiled, code)
        assert status in set(ToolStatus) - {ToolStatus.TOOL_ERROR}, (spoil, text)
        for number, neighbour in enumerate(neighbours):
            status, text = await _ran(neighbour, _LOOK)
            assert (status, text.strip()) == (ToolStatus.OK, f"({number}, '{number}', ['kept'], True)"), spoil
        await spoiled.close()
    fresh = GatewayToolSession(box, [JupyterTool.name])
    assert await _with_a_place(fresh, "print(len([1, 2]), 6 * 7)") == (ToolStatus.OK, "2 42")
    for session in (fresh, *neighbours):
        await session.close()
    assert box.counts["infrastructure"] == spoilable.live.counts["refused"]  # which were asked again
    await until(lambda: not spoilable.live.gauges["live_processes"])
    await assert_clean(spoilable)
