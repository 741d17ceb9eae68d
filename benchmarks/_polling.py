"""The other arm of the orchestrator benchmark: a hub that is polled over HTTP and moves pickled arrays.

Such hubs work in this way: rollout workers poll for a task and post each finished sequence as a pickle; the trainer polls
until a batch is there and posts its new version; the hub holds everything in memory behind one lock, with the same
staleness quota as ours. Connections are kept alive and no record is made durable, which favours this arm.
This arm uses pickle because it imitates a hub that does, only between this benchmark's own processes on loopback.
"""

from __future__ import annotations

import http.client
import json
import pickle
import threading
import time
from collections import deque
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np

POLL_S = 0.1  # between two requests without a task or batch in the answer


class Hub:
    def __init__(self, batch_size: int, group_size: int, max_staleness: int) -> None:
        self._batch_size = batch_size
        self._group_size = group_size
        self._quota = (max_staleness + 1) * batch_size
        self._lock = threading.Lock()
        self._ready: deque[dict[str, Any]] = deque()
        self._outstanding = 0  # issued and not yet trained
        self._version = 0
        self._issued = 0

    def task(self) -> dict[str, Any] | None:
        with self._lock:
            if self._outstanding >= self._quota:
                return None
            self._outstanding += self._group_size
            self._issued += 1
            return {"group": self._issued, "size": self._group_size, "version": self._version, "question": "q"}

    def put(self, sequence: dict[str, Any]) -> None:
        with self._lock:
            self._ready.append(sequence)

    def batch(self) -> list[dict[str, Any]] | None:
        with self._lock:
            if len(self._ready) < self._batch_size:
                return None
            return [self._ready.popleft() for _ in range(self._batch_size)]

    def trained(self, version: int) -> None:
        with self._lock:
            self._version = version
            self._outstanding -= self._batch_size


def serve(port: int, batch_size: int, group_size: int, max_staleness: int) -> None:
    hub = Hub(batch_size, group_size, max_staleness)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True
        wbufsize = -1  # one write per answer

        def do_GET(self) -> None:
            if self.path == "/task":
                self._answer(json.dumps(hub.task()).encode())
            else:
                batch = hub.batch()
                self._answer(b"" if batch is None else pickle.dumps(batch, protocol=pickle.HIGHEST_PROTOCOL))

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.path == "/sequence":
                hub.put(pickle.loads(body))
            else:
                hub.trained(int(body))
            self._answer(b"")

        def _answer(self, body: bytes) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *arguments: Any) -> None:
            """Quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    server.daemon_threads = True
    server.serve_forever(poll_interval=0.5)


class Client:
    def __init__(self, port: int) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)

    def get(self, path: str) -> bytes:
        self._connection.request("GET", path)
        return self._connection.getresponse().read()

    def post(self, path: str, body: bytes) -> None:
        self._connection.request("POST", path, body)
        self._connection.getresponse().read()


def replica(port: int, num_tokens: int, num_threads: int, seed: int) -> None:
    """Workers that each poll for a task and post its sequences."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, 50_000, num_tokens).astype(np.int32)
    logprobs = -rng.exponential(1.0, num_tokens).astype(np.float32)

    def work() -> None:
        client = Client(port)
        while True:
            task = json.loads(client.get("/task"))
            if task is None:
                time.sleep(POLL_S)
                continue
            for index in range(task["size"]):
                sequence = {
                    "group": task["group"],
                    "index": index,
                    "reward": float(index % 2),
                    "token_ids": ids,
                    "logprobs": logprobs,
                    "versions": np.full(num_tokens, task["version"], dtype=np.int32),
                    "loss_mask": np.ones(num_tokens, dtype=bool),
                }
                client.post("/sequence", pickle.dumps(sequence, protocol=pickle.HIGHEST_PROTOCOL))

    threads = [threading.Thread(target=work, daemon=True) for _ in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


class Trainer:
    def __init__(self, port: int) -> None:
        self._client = Client(port)

    def pull(self) -> list[dict[str, Any]]:
        while not (body := self._client.get("/batch")):
            time.sleep(POLL_S)
        batch: list[dict[str, Any]] = pickle.loads(body)
        return batch

    def publish(self, version: int) -> None:
        self._client.post("/version", str(version).encode())
