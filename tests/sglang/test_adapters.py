"""The true SGLang server serves several adapters on one base. A newer SGLang that differs fails here first."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from services.common import tiny as tiny_models
from services.common.errors import ModelMismatchError
from services.common.export import ADAPTER_WEIGHTS, PEFT_CONFIG, adapter_files
from services.common.lora import identity_of
from services.common.system.machine import free_ports
from services.common.text.chat import load_model
from services.inference.engine.base import WeightUpdate
from tests.conformance.subjects import server_engine, until_tokens
from tests.random_models import (
    TOLERANCE,
    build_model,
    make_prompt,
    make_request,
    max_gap,
    reference_logprobs,
)
from tests.sglang.server import Server
from tests.unit.inference.test_adapters import CONFIG, merged, version

pytestmark = [pytest.mark.sglang]

PROMPT = [token % 200 for token in make_prompt(30)]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("base") / "model"
    tiny_models.build(path, seed=0)
    return path


@pytest.fixture(scope="module")
def server(sglang_python: str, base: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("log") / "server.log"
    adapters = {
        "max_lora_rank": CONFIG.rank,
        "max_loras_per_batch": 3,
        "lora_backend": "torch_native",
        "lora_target_modules": "all",
    }
    with Server(Path(sglang_python), base, log, free_ports(1)[0], **adapters) as running:
        yield running


def save(directory: Path, model: Any, number: int) -> Path:
    """A version as a directory of PEFT's format."""
    from safetensors.torch import save_file

    directory.mkdir()
    save_file(version(model, number), directory / ADAPTER_WEIGHTS)
    files = adapter_files(identity_of(model, CONFIG, ""), "base", "float32", {})
    (directory / PEFT_CONFIG).write_bytes(files[PEFT_CONFIG])
    return directory


def generate(server: Server, name: str | None) -> tuple[int, Any]:
    sampling = {"max_new_tokens": 16, "ignore_eos": True}
    body = {"input_ids": PROMPT, "sampling_params": sampling, "return_logprob": True, "lora_path": name}
    return server.post("/generate", {key: value for key, value in body.items() if value is not None})


def gap(model: Any, answer: Any) -> float:
    pairs = answer["meta_info"]["output_token_logprobs"]
    ids = [int(pair[1]) for pair in pairs]
    expected = reference_logprobs(model, PROMPT + ids, len(PROMPT))[torch.arange(len(ids)), torch.tensor(ids)]
    return float((expected - torch.tensor([pair[0] for pair in pairs])).abs().max())


def test_a_server_serves_two_adapters_and_the_base_side_by_side(server: Server, base: Path, tmp_path: Path) -> None:
    model = load_model(base)
    for number in (1, 2):
        path = save(tmp_path / str(number), model, number)
        status, answer = server.post("/load_lora_adapter", {"lora_name": f"p-{number}", "lora_path": str(path)})
        assert (status, answer["success"]) == (200, True), answer
    for name, oracle in ((None, model), *((f"p-{n}", merged(model, version(model, n))) for n in (1, 2))):
        status, answer = generate(server, name)
        assert status == 200, answer
        assert gap(oracle, answer) <= TOLERANCE, name
        assert name is None or gap(model, answer) > 100 * TOLERANCE, "the base would be noticed"


def test_an_unloaded_adapter_is_read_again_unless_its_directory_is_gone(
    server: Server, base: Path, tmp_path: Path
) -> None:
    """So a version needs a directory of its own, which goes with it: SGLang would serve another version under its name."""
    path = save(tmp_path / "3", load_model(base), 3)
    assert server.post("/load_lora_adapter", {"lora_name": "p-3", "lora_path": str(path)})[0] == 200
    assert server.post("/unload_lora_adapter", {"lora_name": "p-3"})[0] == 200
    assert generate(server, "p-3")[0] == 200, "read again"
    assert server.post("/unload_lora_adapter", {"lora_name": "p-3"})[0] == 200
    path.rename(tmp_path / "gone")
    assert generate(server, "p-3")[0] == 400
    assert generate(server, "p-4")[0] == 400


async def test_the_engine_serves_each_version_of_an_adapter_with_its_log_probabilities(
    sglang_python: str, tmp_path: Path
) -> None:
    """Before, across and after a swap, and through the death of the server."""
    model = build_model("qwen3")
    model.save_pretrained(tmp_path / "model")
    oracles = [merged(model, version(model, number)) for number in range(3)]
    identity = identity_of(model, CONFIG, "")
    engine = server_engine(
        "sglang", tmp_path / "model", version(model, 0), tmp_path, adapter=identity, dtype="float32", engine_slots=4
    )
    await engine.start()
    try:
        prompt = make_prompt(30)
        first = await engine.generate(make_request(prompt, max_new_tokens=20))
        assert max_gap(oracles[0], prompt, first, first.segments[0]) <= TOLERANCE
        pending = asyncio.ensure_future(engine.generate(make_request(prompt, max_new_tokens=400)))
        await until_tokens(engine, 60)
        await engine.update(WeightUpdate.full(version(model, 1), 1))
        across = await pending
        assert [segment.weight_version for segment in across.segments] == [0, 1]
        assert sum(segment.num_tokens for segment in across.segments) == 400
        for segment in across.segments:
            assert not segment.mixed_cache
            assert max_gap(oracles[segment.weight_version], prompt, across, segment) <= TOLERANCE
        assert max_gap(oracles[0], prompt, across, across.segments[1]) > 100 * TOLERANCE
        await engine.update(WeightUpdate.full(version(model, 2), 2))
        (server,) = engine._fleet.servers
        dying = asyncio.ensure_future(engine.generate(make_request(prompt, max_new_tokens=400)))
        await until_tokens(engine, 60)
        server.process.kill()
        revived = await dying
        assert {segment.weight_version for segment in revived.segments} == {2}
        assert max_gap(oracles[2], prompt, revived, revived.segments[0]) <= TOLERANCE
        with pytest.raises(ModelMismatchError, match="other shape"):
            await engine.update(WeightUpdate.full(version(model, 3, CONFIG.model_copy(update={"rank": 2})), 3))
    finally:
        await engine.stop()
    assert not list(tmp_path.glob("**/version-*")), "directories of versions go with them"


def test_an_adapter_of_a_larger_rank_than_the_server_has_room_for_is_refused(
    server: Server, base: Path, tmp_path: Path
) -> None:
    model, large = load_model(base), CONFIG.model_copy(update={"rank": 2 * CONFIG.rank})
    from safetensors.torch import save_file

    save_file(version(model, 1, large), tmp_path / ADAPTER_WEIGHTS)
    files = adapter_files(identity_of(model, large, ""), "base", "float32", {})
    (tmp_path / PEFT_CONFIG).write_bytes(files[PEFT_CONFIG])
    status, answer = server.post("/load_lora_adapter", {"lora_name": "large", "lora_path": str(tmp_path)})
    assert status == 400 and "rank" in str(answer), answer
