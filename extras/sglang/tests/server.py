"""The true SGLang server on a CPU, started by its launcher without an engine.

For the probe of ``make test-sglang``, and for tests of the server's own answers.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from tests.waiting import WAIT_S

LAUNCHER = Path(__file__).resolve().parents[1] / "server/launch.py"
START_TIMEOUT_S = 180.0  # 14 s on an idle machine
STOP_TIMEOUT_S = 20.0


class ServerError(Exception):
    """The server did not start; the message ends with its last output."""


class Server:
    """One server on loopback, its log in a file. ``with Server(...) as server`` waits until the server is healthy."""

    def __init__(self, python: Path, model: Path, log: Path, port: int, **more: str | int) -> None:
        """``more`` arguments of the server by their names in SGLang."""
        self._log = log
        self.address = f"http://127.0.0.1:{port}"
        arguments = {
            "model-path": model, "host": "127.0.0.1", "port": port, "device": "cpu", "dtype": "float32",
            "attention-backend": "torch_native", "sampling-backend": "pytorch", "grammar-backend": "none",
            "mem-fraction-static": 0.1, "max-total-tokens": 16384,
            **{name.replace("_", "-"): value for name, value in more.items()},
        }  # fmt: skip
        flags = [part for name, value in arguments.items() for part in (f"--{name}", str(value))]
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "SGLANG_CPU_OMP_THREADS_BIND": str(max(os.sched_getaffinity(0))),
        }
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                [
                    str(python),
                    str(LAUNCHER),
                    *flags,
                    "--sleep-on-idle",
                    *(["--enable-lora"] if "max_lora_rank" in more else []),
                ],
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )

    def __enter__(self) -> Server:
        ends = time.monotonic() + START_TIMEOUT_S
        try:
            while not self._is_healthy():
                if self.process.poll() is not None:
                    raise ServerError(f"the server ended with {self.process.returncode}: {self.last_error()}")
                if time.monotonic() > ends:
                    raise ServerError(f"the server was not healthy within {START_TIMEOUT_S:.0f} s: {self.last_error()}")
                time.sleep(0.5)
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def stop(self) -> None:
        """SIGTERM; the whole process group is killed when that is not enough."""
        self.process.terminate()
        try:
            self.process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, 9)
            self.process.wait(STOP_TIMEOUT_S)

    def last_error(self) -> str:
        """The last line of the log that names an error; the last line where none does."""
        lines = [line.strip() for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
        return next((line for line in reversed(lines) if "Error" in line), lines[-1] if lines else "no output")

    def post(self, path: str, body: dict[str, Any], timeout_s: float = 60.0) -> tuple[int, Any]:
        """Status and JSON answer, a refusal's too."""
        request = urllib.request.Request(
            self.address + path, json.dumps(body).encode(), {"Content-Type": "application/json"}, method="POST"
        )
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as refusal:
            with refusal:
                return refusal.code, json.load(refusal)

    def get(self, path: str, timeout_s: float = 60.0) -> Any:
        """The JSON answer."""
        with urllib.request.urlopen(self.address + path, timeout=timeout_s) as answer:
            return json.load(answer)

    def _is_healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.address}/health", timeout=WAIT_S):
                return True
        except OSError:  # URLError, refused and timed out alike
            return False
