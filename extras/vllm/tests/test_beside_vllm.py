"""The modules that run in vLLM's interpreter: the key, the end with the server, and the transfer over a stand-in for vLLM."""

from __future__ import annotations

import importlib
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from extras.vllm.server import guard

FOLDER = Path(guard.__file__).parent


class Embedding(torch.nn.Module):
    """As vLLM's: ``cpu_linear`` computes with a packed copy of the matrix."""

    def __init__(self, weight: torch.nn.Parameter) -> None:
        super().__init__()
        self.weight = weight
        self.quant_method = Method()


class Head(Embedding):
    pass


class Method:
    """``packs``: whether a pack is made anew."""

    packs = True

    def process_weights_after_loading(self, head: Any) -> None:
        if self.packs:
            copy = head.weight.detach().clone()
            head.cpu_linear = lambda x: x @ copy.T

    def apply(self, head: Any, x: torch.Tensor) -> torch.Tensor:
        return head.cpu_linear(x) if hasattr(head, "cpu_linear") else torch.nn.functional.linear(x, head.weight)


class Model(torch.nn.Module):
    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.embed = Embedding(torch.nn.Parameter(torch.ones(5, 3)))
        self.head = Head(self.embed.weight if tied else torch.nn.Parameter(torch.ones(5, 3)))
        self.head.quant_method.process_weights_after_loading(self.head)

    @torch.no_grad()
    def load_weights(self, tensors: Any) -> set[str]:
        parameters = dict(self.named_parameters())
        loaded = set()
        for name, value in tensors:
            parameters[name].copy_(value)
            loaded.add(name)
        return loaded


class Registry:
    _registry: dict[str, Any] = {}

    @classmethod
    def register_engine(cls, name: str, kind: Any) -> None:
        cls._registry[name] = kind


class Base:
    """As vLLM's ``WeightTransferEngine``."""

    def __class_getitem__(cls, of: Any) -> type:
        return cls

    def __init__(self, model: Any, config: Any) -> None:
        self.model, self.model_config, self.device = model, config, torch.device("cpu")

    def parse_update_info(self, given: dict[str, Any]) -> Any:
        return self.update_info_cls(**given)  # type: ignore[attr-defined]


@pytest.fixture
def staged(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module over modules that stand in for vLLM's."""
    layers = "vllm.model_executor.layers.vocab_parallel_embedding"
    modules = {
        "vllm.distributed.weight_transfer.base": {
            "WeightTransferEngine": Base,
            "WeightTransferInitInfo": object,
            "WeightTransferUpdateInfo": object,
        },
        "vllm.distributed.weight_transfer.factory": {"WeightTransferEngineFactory": Registry},
        layers: {"ParallelLMHead": Head, "UnquantizedEmbeddingMethod": Method, "VocabParallelEmbedding": Embedding},
        "vllm.model_executor.model_loader.reload": {
            "initialize_layerwise_reload": lambda model: None,
            "finalize_layerwise_reload": lambda model, config: None,
        },
    }
    for name, content in modules.items():
        parts = name.split(".")
        for end in range(1, len(parts)):
            monkeypatch.setitem(sys.modules, ".".join(parts[:end]), types.ModuleType(".".join(parts[:end])))
        module = types.ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.setattr(Registry, "_registry", {})
    for name in ("staged", "tether"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield importlib.import_module("staged")
    for name in ("staged", "tether"):
        sys.modules.pop(name, None)


def update(staged: Any, model: Model, tensors: dict[str, torch.Tensor], directory: Path, *, tied: bool) -> None:
    save_file(tensors, directory / "model.safetensors")
    config = types.SimpleNamespace(hf_text_config=types.SimpleNamespace(tie_word_embeddings=tied))
    transfer = staged.StagedWeights(model, config)
    transfer.start_weight_update()
    transfer.update_weights({"directory": str(directory)})
    transfer.finish_weight_update()


NEW = torch.arange(15, dtype=torch.float32).reshape(5, 3)


@pytest.mark.parametrize("tied", [True, False])
def test_an_update_reaches_the_pack_of_the_head(staged: Any, tied: bool, tmp_path: Path) -> None:
    model = Model(tied=tied)
    update(staged, model, {"embed.weight": NEW} | ({} if tied else {"head.weight": 2 * NEW}), tmp_path, tied=tied)
    probe = torch.ones(1, 3)
    assert torch.equal(Method().apply(model.head, probe), probe @ ((1 if tied else 2) * NEW).T)
    assert list(Registry._registry) == [staged.NAME]


def test_a_head_of_tied_embeddings_that_keeps_the_old_weights_is_refused(
    staged: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Model(tied=True)
    monkeypatch.setattr(Method, "packs", False)
    with pytest.raises(RuntimeError, match=r"other weights than those that were loaded.*\(tied embeddings\)"):
        update(staged, model, {"embed.weight": NEW}, tmp_path, tied=True)


def test_a_head_that_was_separated_from_tied_embeddings_is_refused(staged: Any, tmp_path: Path) -> None:
    model = Model(tied=False)
    with pytest.raises(RuntimeError, match="tied embeddings: after the reload the head has another matrix"):
        update(staged, model, {"embed.weight": NEW, "head.weight": NEW.clone()}, tmp_path, tied=True)


def test_an_update_without_a_tensor_of_the_model_is_refused_with_its_name(staged: Any, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"lacks 1 tensors of the model: head\.weight"):
        update(staged, Model(tied=False), {"embed.weight": NEW}, tmp_path, tied=False)


async def answered(scope: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    sent: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        sent.append("served")

    async def send(message: Any) -> None:
        sent.append(message.get("status", message["type"]))

    async def receive() -> Any:
        raise AssertionError

    monkeypatch.setenv(guard.KEY, "secret")
    await guard.KeyRequired(app)({"path": "/pause", "headers": [], **scope}, receive, send)
    return sent


@pytest.mark.parametrize(
    ("scope", "expected"),
    [
        ({"type": "http"}, [401, "http.response.body"]),
        ({"type": "http", "headers": [(b"authorization", b"Bearer other")]}, [401, "http.response.body"]),
        ({"type": "http", "headers": [(b"authorization", b"Bearer secret")]}, ["served"]),
        ({"type": "http", "path": "/health"}, ["served"]),
        ({"type": "http", "path": "/health/../pause"}, [401, "http.response.body"]),
        ({"type": "lifespan"}, ["served"]),
        ({"type": "websocket", "headers": [(b"authorization", b"Bearer secret")]}, ["websocket.close"]),
    ],
)
async def test_only_a_caller_with_the_key_reaches_the_server(
    scope: dict[str, Any], expected: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert await answered(scope, monkeypatch) == expected


def test_a_worker_ends_with_its_server() -> None:
    """In a process group of its own, as the server is; the worker ends although its server has ended before."""
    program = (
        "import os, sys, time; sys.path.insert(0, sys.argv[1]); import tether; tether.end_with_server(); time.sleep(60)"
    )
    server = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    worker = subprocess.Popen(
        [sys.executable, "-c", program, str(FOLDER)],
        env={"ROLLMILL_SERVER_PID": str(server.pid)},
        start_new_session=True,
    )
    server.kill()
    server.communicate()
    assert worker.wait(timeout=50) == -9
