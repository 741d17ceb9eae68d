"""A real redis-server on a port of its own, which tests may kill and start again, empty."""

from __future__ import annotations

import socket
import subprocess
import time
from pathlib import Path

from tests.needs import installed


class RedisServer:
    """Forgets everything when it is killed, unless ``keeps_data`` is set before its start."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.keeps_data = False
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]
        self.uri = f"redis://127.0.0.1:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        program = installed("redis-server")
        assert program is not None
        self._process = subprocess.Popen(
            [program, "--port", str(self.port), "--bind", "127.0.0.1", "--save", "",
             "--appendonly", "yes" if self.keeps_data else "no", "--appendfsync", "everysec"],
            cwd=self._directory, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        end = time.monotonic() + 20
        while time.monotonic() < end:
            try:
                with socket.create_connection(("127.0.0.1", self.port), timeout=1) as connection:
                    connection.sendall(b"PING\r\n")
                    if connection.recv(16).startswith(b"+PONG"):
                        return
            except OSError:
                pass
            time.sleep(0.02)  # not there, or still reading its data
        raise TimeoutError("redis-server did not answer within 20 s")

    def kill(self) -> None:
        """As kill -9 does."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(10)
            self._process = None
