"""The server's answers on which the engine's design depends. A newer SGLang that differs fails here first."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from services.common import tiny as tiny_models
from services.common.system.machine import free_ports
from tests.random_models import make_prompt
from tests.sglang.server import Server

pytestmark = [pytest.mark.sglang]

FLUSHED = {"flush_cache": True}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two versions of a model, with a tokenizer."""
    root = tmp_path_factory.mktemp("models")
    for seed, name in enumerate(("old", "new")):
        tiny_models.build(root / name, seed=seed)
    return root / "old", root / "new"


@pytest.fixture(scope="module")
def server(sglang_python: str, models: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("log") / "server.log"
    with Server(Path(sglang_python), models[0], log, free_ports(1)[0]) as running:
        yield running


def load(server: Server, path: Path, version: int, **more: Any) -> tuple[int, Any]:
    return server.post("/update_weights_from_disk", {"model_path": str(path), "weight_version": str(version), **more})


def generate(server: Server, num_tokens: int) -> Any:
    status, answer = server.post(
        "/generate",
        {
            "input_ids": make_prompt(30),
            "sampling_params": {"max_new_tokens": num_tokens, "ignore_eos": True},
            "return_logprob": True,
        },
    )
    assert status == 200, answer
    return answer


def versions(answer: Any) -> list[str]:
    return [span["version"] for span in answer["meta_info"]["weight_versions"]]


def test_spans_name_the_version_that_computed_each_token(server: Server, models: tuple[Path, Path]) -> None:
    assert load(server, models[0], 4, **FLUSHED)[0] == 200
    answer = generate(server, 8)
    assert answer["meta_info"]["weight_versions"] == [{"version": "4", "start": 0, "end": 8}]
    assert answer["meta_info"]["finish_reason"]["type"] == "length"


def test_a_refused_flush_has_changed_the_weights_all_the_same(server: Server, models: tuple[Path, Path]) -> None:
    """In place with a flush: 400, and the tokens that follow are the new version's. So a 400 leaves the state unknown."""
    assert load(server, models[0], 5, **FLUSHED)[0] == 200
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(generate, server, 800)
        while not server.get("/v1/loads?include=core")["loads"][0]["num_running_reqs"]:
            assert not running.done()
        assert server.post("/pause_generation", {"mode": "in_place"})[0] == 200
        status, answer = load(server, models[1], 6, **FLUSHED)
        told = server.get("/model_info")["weight_version"]
        assert server.post("/continue_generation", {})[0] == 200
        generated = running.result(timeout=60)
    assert status == 400
    assert "the cache was not flushed" in answer["message"]
    assert versions(generated) == ["5", "6"]
    assert told == "5", "the server reports the version: Server._load_for_sure may rely on the report"


def test_a_path_that_is_not_there_changes_nothing(server: Server, models: tuple[Path, Path], tmp_path: Path) -> None:
    assert load(server, models[0], 7, **FLUSHED)[0] == 200
    status, answer = load(server, tmp_path / "nowhere", 8, **FLUSHED)
    assert status == 400
    assert not answer["success"]
    assert versions(generate(server, 4)) == ["7"]
