"""A model hub on this machine: the requests that huggingface_hub makes for a small commit."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Hub:
    """``files`` are those of the last commit, by path; ``refuse`` is the status of every answer where it is set."""

    def __init__(self) -> None:
        self.repositories: dict[str, bool] = {}  # name -> private
        self.files: dict[str, bytes] = {}
        self.messages: list[str] = []
        self.tokens: set[str | None] = set()
        self.refuse: int | None = None
        self.url = ""

    def answer(self, path: str, body: bytes) -> Any:
        if path == "/api/repos/create":
            wanted = json.loads(body)
            name = f"{wanted['organization']}/{wanted['name']}" if wanted.get("organization") else wanted["name"]
            self.repositories[name] = bool(wanted.get("private")) or wanted.get("visibility") == "private"
            return {"url": f"{self.url}/{name}", "id": name}
        if path == "/api/validate-yaml":
            return {"errors": [], "warnings": []}
        if "/preupload/" in path:
            paths = [file["path"] for file in json.loads(body)["files"]]
            return {
                "files": [{"path": one, "uploadMode": "regular", "shouldIgnore": False, "oid": None} for one in paths]
            }
        if "/commit/" in path:
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "header":
                    self.messages.append(line["value"]["summary"])
                elif line["key"] == "file":
                    self.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            name = path.removeprefix("/api/models/").partition("/commit/")[0]
            return {"success": True, "commitOid": "0" * 40, "commitUrl": f"{self.url}/{name}/commit/{'0' * 40}"}
        return {"siblings": [], "sha": "0" * 40, "id": "x", "tags": []}


@contextmanager
def answering(status: Callable[[str], int]) -> Iterator[tuple[str, list[str]]]:
    """A hub that answers the request for a name with a status: its address, and the paths that it is asked for."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(status(self.path.split("/", 3)[3]))
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    with _started(Handler) as url:
        yield url, asked


@contextmanager
def _started(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextmanager
def serving() -> Iterator[Hub]:
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        def _answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            hub.tokens.add(self.headers.get("Authorization"))
            told = {"error": "refused here"} if hub.refuse else hub.answer(self.path.partition("?")[0], body)
            data = json.dumps(told).encode()
            self.send_response(hub.refuse or 200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST = _answer

        def log_message(self, *_: Any) -> None:
            pass

    with _started(Handler) as hub.url:
        yield hub
