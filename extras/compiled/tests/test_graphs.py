"""Decoding steps over static buffers, run on a CPU as a GPU runs them: shapes, padding, arguments, devices, compilation."""

from __future__ import annotations

import copy
from functools import partial
from unittest.mock import MagicMock, create_autospec

import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch._subclasses.fake_tensor import FakeTensorMode

from extras.compiled import graphs, step
from extras.compiled.graphs import CudaCapture, Replay
from services.common.weights.snapshot import named_weights
from services.inference.engine.base import WeightUpdate
from services.inference.engine.torch.decoder import Decoder, prepare
from tests.random_models import TOLERANCE, build_model, make_prompt, max_gap
from tests.unit.inference.test_engine_paged import CONTEXT, MODELS, Played, pool_bytes


class EagerCapture:
    """Keeps the step instead of recording it; takes the place of ``CudaCapture``."""

    def __init__(self) -> None:
        self.steps: list[Replay] = []

    def __call__(self, step: Replay) -> Replay:
        self.steps.append(step)
        return step


@pytest.fixture
def torch_decoder(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small models decode in torch too, as on a GPU."""
    monkeypatch.setattr(step, "PACKED_BYTES", 0)


@pytest.fixture
def capture(monkeypatch: pytest.MonkeyPatch) -> EagerCapture:
    made = EagerCapture()
    monkeypatch.setattr(graphs, "CudaCapture", lambda: made)
    return made


@pytest.mark.usefixtures("torch_decoder")
def test_static_steps_sample_like_plain_ones_with_updates_between(
    monkeypatch: pytest.MonkeyPatch, capture: EagerCapture
) -> None:
    monkeypatch.setattr(graphs, "LEAST_WIDTH", 32)
    static = Played(kv_bytes=pool_bytes(16), stepping="graph")
    plain = Played(kv_bytes=pool_bytes(16))
    names = []
    for played in (static, plain):
        own = [played.submit(make_prompt(12 * seed + 5, seed % 2), seed, 20 + 9 * seed) for seed in range(5)]
        for version in (1, 2):
            played.step(9)
            played.update(version)
        played.end()
        names.append(own)
    for one, other in zip(*names, strict=True):
        generation = static.outcomes[one]
        assert generation.token_ids == plain.outcomes[other].token_ids
        for segment in generation.segments:
            gap = max_gap(MODELS[segment.weight_version], static.prompts[one], generation, segment)
            assert gap <= TOLERANCE
    assert 2 <= len(capture.steps) < static.core.counters.steps / 5, "a shape is captured once"


@pytest.mark.usefixtures("torch_decoder")
def test_padding_rows_change_no_slot_and_no_result(capture: EagerCapture) -> None:
    decoders = [
        Decoder(copy.deepcopy(MODELS[0]), num_slots=6, context_length=CONTEXT, **settings)
        for settings in ({}, {"stepping": "graph"})
    ]
    tokens, positions = np.arange(3) + 40, np.array([0, 0, 0])
    found = []
    with torch.inference_mode():
        for decoder in decoders:
            decoder.cache.own(np.arange(3), positions, positions + 1)
            found.append(decoder.decode(np.arange(3), tokens, positions))
    assert found[1].shape == found[0].shape
    assert torch.allclose(*found, atol=1e-5)
    reach = decoders[0].cache.reach(np.arange(6), CONTEXT)
    for one, other in zip(*(decoder.cache.read(1, reach) for decoder in decoders), strict=True):
        assert (one - other).abs().max() < 1e-5


@pytest.mark.slow
@pytest.mark.usefixtures("torch_decoder")
def test_a_compiled_layer_is_compiled_once_for_all_layers_and_computes_the_same(
    monkeypatch: pytest.MonkeyPatch, capture: EagerCapture
) -> None:
    """By dynamo without code generation: a graph break fails, as does an operation that it cannot trace."""
    counter = CompileCounter()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=counter))
    torch._dynamo.reset()
    compiled, plain = (
        Decoder(copy.deepcopy(MODELS[0]), num_slots=8, context_length=CONTEXT, **settings)
        for settings in ({"stepping": "compiled"}, {})
    )
    with torch.inference_mode():
        for num_rows, position in ((3, 0), (5, 40), (8, 100)):
            slots, positions = np.arange(num_rows), np.full(num_rows, position)
            for decoder in (compiled, plain):
                decoder.cache.own(slots, 0 * positions, positions + 1)
            found, wanted = (d.decode(slots, slots, positions) for d in (compiled, plain))
            assert (found - wanted).abs().max() < 1e-4
    torch._dynamo.reset()
    assert 2 <= counter.frame_count <= 4, "two functions, for the first number of rows and for any"


def test_a_capture_gives_torch_arguments_that_it_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = MagicMock()
    entered = create_autospec(torch.cuda.graph)
    for name, fake in {
        "graph_pool_handle": create_autospec(torch.cuda.graph_pool_handle, return_value=(0, 7)),
        "current_stream": create_autospec(torch.cuda.current_stream),
        "stream": create_autospec(torch.cuda.stream),
        "Stream": MagicMock(),
        "CUDAGraph": MagicMock(return_value=graph),
        "graph": entered,
    }.items():
        assert hasattr(torch.cuda, name)
        monkeypatch.setattr(torch.cuda, name, fake)
    step = MagicMock(side_effect=["warm", "warm", "captured"])
    replay = CudaCapture()(step)
    entered.assert_called_once_with(graph, pool=(0, 7), capture_error_mode="thread_local")
    assert step.call_count == 3 and not graph.replay.called
    assert (replay(), replay()) == ("captured", "captured")
    assert graph.replay.call_count == 2


@pytest.mark.usefixtures("torch_decoder")
@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
@pytest.mark.parametrize(("kind", "dtype"), [("qwen3", torch.bfloat16)])
def test_every_tensor_of_a_step_is_on_the_device_and_of_its_type(
    kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, capture: EagerCapture
) -> None:
    """Fake tensors of another device than the CPU: an operation between devices or types that a GPU refuses fails here."""
    model = build_model(kind).to(dtype)
    with FakeTensorMode(), torch.inference_mode():
        for module in model.modules():
            for tensors in (module._parameters, module._buffers):
                for name, tensor in tensors.items():
                    if tensor is not None:
                        tensors[name] = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        monkeypatch.setattr(model, "to", lambda device: model)
        decoder = Decoder(model, num_slots=4, context_length=CONTEXT, device="meta", stepping="graph")
        slots, none, ends = np.arange(3), np.zeros(3, int), np.full(3, 40)
        decoder.cache.own(slots, none, ends)
        for start, fresh in ((0, True), (20, False)):
            decoder.extend(slots, torch.zeros(3, 20, dtype=torch.long, device="meta"), none + start, fresh=fresh)
        decoder.cache.share(0, [1], 37)
        decoder.cache.own(np.array([0, 1]), np.array([37, 37]), np.array([40, 40]))
        logits = decoder.decode(slots, slots, ends - 1)
        assert (logits.shape, logits.device.type, logits.dtype) == ((3, 301), "meta", dtype)
        decoder.cache.clear(2)


@pytest.mark.usefixtures("torch_decoder")
def test_captured_steps_are_dropped_with_the_memory_that_they_name(capture: EagerCapture) -> None:
    """A GPU gives other addresses when the memory is allocated again."""
    played = Played(kv_bytes=pool_bytes(16), stepping="graph")
    played.submit(make_prompt(12), 0, 20)
    played.step(3)
    before = len(capture.steps)
    assert before
    decoder = played.core.decoder
    decoder.release()
    decoder.restore()
    played.core.update(prepare(WeightUpdate.full(named_weights(MODELS[1]), 1), decoder.weights), recompute=True)
    played.step(3)
    assert len(capture.steps) > before
