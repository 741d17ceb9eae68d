"""Whether an environment has a vLLM that loads for the CPU: ``python -m extras.vllm.tests.probe PYTHON``.

Uses none of the project's engine, so that a fault of that is a failure of the tests, not a reason to leave them out.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROBE_S = 120.0
PROGRAM = """
import vllm.entrypoints.launchers.api_server.entry
import vllm._C
from vllm.platforms import current_platform
assert current_platform.is_cpu(), "this vLLM is not built for CPUs"
"""


def main(python: str) -> None:
    """Exits with the reason on failure."""
    if not Path(python).exists():
        sys.exit(f"error: there is no {python}")
    try:
        done = subprocess.run([python, "-c", PROGRAM], capture_output=True, text=True, check=False, timeout=PROBE_S)
    except subprocess.TimeoutExpired:
        sys.exit(f"error: vLLM was not imported within {PROBE_S:.0f} s")
    if done.returncode != 0:
        sys.exit(f"error: {(done.stderr.strip().splitlines() or ['no output'])[-1]}")


if __name__ == "__main__":
    main(*sys.argv[1:])
