"""A real redis-server on a port of its own, which tests may kill and start again, empty."""

from __future__ import annotations

import socket
import subprocess
from pathlib import Path

from tests.needs import installed
from tests.ports import free_port
from tests.waiting import WAIT_S, wait_until


class RedisServer:
    """Loses all data when killed, unless ``keeps_data`` is set before its start."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.keeps_data = False
        self.port = free_port()
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
        wait_until(self._answers, "redis-server answers")

    def _answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=WAIT_S) as connection:
                connection.sendall(b"PING\r\n")
                return connection.recv(16).startswith(b"+PONG")
        except OSError:
            return False  # not there, or still reading its data

    def kill(self) -> None:
        """As kill -9 does."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(WAIT_S)
            self._process = None
