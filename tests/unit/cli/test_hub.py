"""Names of the hub: looked up once, in the cache first, without retries; a hub that is away is a problem of the machine."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from services.cli.check import models as hub
from services.cli.check.models import check_model_name, hub_problems, look_up
from services.common.config.loading import validate
from services.common.config.recipe import Recipe
from services.common.errors import ConfigError

STATUS = {"there/model": 200, "absent/model": 404, "gated/model": 403, "private/model": 401, "broken/model": 500}


class Hub(BaseHTTPRequestHandler):
    asked: list[str] = []

    def do_GET(self) -> None:
        Hub.asked.append(self.path)
        self.send_response(STATUS[self.path.split("/", 3)[3]])
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def address(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    Hub.asked.clear()
    hub._ask.cache_clear()
    hub._unreachable.clear()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join(30)
    server.server_close()
    hub._ask.cache_clear()
    hub._unreachable.clear()


def recipe_of(path: str, engine: str = "torch", steps: int = 3) -> Recipe:
    tree = {
        "name": "one",
        "run": {"steps": steps},
        "policies": {"model0": {"model": {"path": path}}},
        "inference": {"a": {"engine": engine}},
        "data": {"train": {"path": "rows.jsonl"}},
        "evaluation": {"at_start": False, "at_end": False},
    }
    return validate(tree, source="test")


def test_a_name_that_the_hub_has_is_no_problem_and_is_asked_for_once(address: str) -> None:
    assert [look_up("key", "there/model", "models") for _ in range(3)] == [None] * 3
    assert Hub.asked == ["/api/models/there/model"]


@pytest.mark.parametrize("name", ["absent/model", "gated/model", "private/model"])
def test_a_name_that_the_hub_refuses_is_an_error_of_the_recipe(address: str, name: str) -> None:
    problem = look_up("policies.model0.model.path", name, "models")
    assert problem is not None and not problem.of_machine
    assert name in problem.text and str(STATUS[name]) in problem.text and "hf auth login" in problem.text
    with pytest.raises(ConfigError, match="--checkpoint"):
        check_model_name("--checkpoint", name)


def test_a_hub_that_is_away_is_asked_once_and_is_a_problem_of_the_machine(address: str) -> None:
    problems = [look_up("key", name, "models") for name in ("broken/model", "there/model", "absent/model")]
    assert all(problem is not None and problem.of_machine for problem in problems)
    assert len(Hub.asked) == 1, "a machine without internet waits once"


def test_offline_no_request_is_made(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    problem = look_up("key", "there/model", "models")
    assert problem is not None and problem.of_machine and "HF_HUB_OFFLINE is set" in problem.text
    assert Hub.asked == []


def test_a_name_in_the_cache_is_not_asked_for(address: str, tmp_path: Path) -> None:
    snapshot = tmp_path / "models--absent--model" / "snapshots" / "1"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("1")
    assert look_up("key", "absent/model", "models") is None and Hub.asked == []


@pytest.mark.parametrize(
    ("engine", "steps", "asked"),
    [
        ("torch", 3, 1),
        ("torch", 0, 1),
        ("scripted", 3, 1),
        ("scripted", 0, 0),
        ("mine:Engine", 3, 1),
        ("mine:Engine", 0, 0),
    ],
)
def test_only_models_that_a_process_loads_are_looked_up(address: str, engine: str, steps: int, asked: int) -> None:
    hub_problems(recipe_of("there/model", engine, steps))
    assert len(Hub.asked) == asked


@pytest.mark.parametrize("path", ["/nowhere", "./nowhere", "~/nowhere"])
def test_paths_are_no_names(address: str, path: str) -> None:
    assert hub_problems(recipe_of(path)) == [] and Hub.asked == []
