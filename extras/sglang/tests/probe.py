"""Whether SGLang's server starts in an environment and generates: ``python -m extras.sglang.tests.probe PYTHON``.

Uses none of the project's engine, so that a fault of that is a failure of the tests, not a reason to leave them out.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from extras.sglang.tests.server import Server, ServerError
from services.common import tiny as tiny_models
from services.common.system.machine import free_ports


def main(python: str) -> None:
    """Exits with the reason on failure."""
    if not Path(python).exists():
        sys.exit(f"error: there is no {python}")
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        tiny_models.build(folder / "model", seed=0)
        try:
            with Server(Path(python), folder / "model", folder / "server.log", free_ports(1)[0]) as server:
                status, answer = server.post(
                    "/generate", {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 4, "ignore_eos": True}}
                )
        except ServerError as error:
            sys.exit(f"error: {error}")
    if status != 200 or len(answer["output_ids"]) != 4:
        sys.exit(f"error: the server answered {status}: {answer}")


if __name__ == "__main__":
    main(*sys.argv[1:])
