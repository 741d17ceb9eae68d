from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import Qwen3ForCausalLM

from services.common.errors import ConfigError, ModelMismatchError
from services.trainer.model.attention import Documents, documents_attention
from services.trainer.model.logprobs import Targets
from tests.unit.trainer.building import algorithm, tiny_causal_lm, train_step

LENGTHS = [9, 5, 5, 5, 1, 1, 7]


def packed_inputs(dtype: torch.dtype) -> tuple[list[torch.Tensor], Documents, np.ndarray]:
    torch.manual_seed(0)
    offsets = np.concatenate([[0], np.cumsum(LENGTHS)]).astype(np.int64)
    tensors = [torch.randn(1, int(offsets[-1]), heads, 8, dtype=dtype).transpose(1, 2) for heads in (4, 2, 2)]
    return [t.requires_grad_() for t in tensors], Documents.from_offsets(offsets), offsets


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_packed_documents_are_bit_equal_to_single_ones_forward_and_backward(dtype: torch.dtype) -> None:
    inputs, documents, offsets = packed_inputs(dtype)
    module = torch.nn.Identity()
    output, _ = documents_attention(module, *inputs, scaling=0.3, documents=documents)
    weight = torch.randn_like(output)
    packed_grads = torch.autograd.grad((output * weight).sum(), inputs)
    for start, end in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
        single = [t.detach()[:, :, start:end].requires_grad_() for t in inputs]
        expected = scaled_dot_product_attention(*single, is_causal=True, scale=0.3, enable_gqa=True).transpose(1, 2)
        assert torch.equal(output[:, start:end], expected)
        grads = torch.autograd.grad((expected * weight[:, start:end]).sum(), single)
        for packed_grad, grad in zip(packed_grads, grads, strict=True):
            assert torch.equal(packed_grad[:, :, start:end], grad)


@pytest.mark.parametrize("tied", [True, False])
def test_the_packed_model_equals_transformers_on_each_document_alone(tied: bool) -> None:
    step = train_step(algorithm(), causal_lm=tiny_causal_lm(tied=tied))
    plain: Qwen3ForCausalLM = tiny_causal_lm(tied=tied)
    offsets = np.concatenate([[0], np.cumsum(LENGTHS)]).astype(np.int64)
    token_ids = torch.randint(0, 31, (int(offsets[-1]),))
    position_ids = torch.cat([torch.arange(n) for n in LENGTHS])
    targets = torch.cat([torch.arange(s + 1, e) for s, e in itertools.pairwise(offsets)])
    logprobs, _ = step.model(
        token_ids, position_ids, Documents.from_offsets(offsets), Targets.at(targets, token_ids), 1.0
    )
    expected = []
    for start, end in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
        ids = token_ids[start:end]
        alone = plain(input_ids=ids[None]).logits[0].log_softmax(-1)
        expected.append(alone[:-1].gather(1, ids[1:, None])[:, 0])
    torch.testing.assert_close(logprobs, torch.cat(expected), rtol=0, atol=1e-5)


def test_a_model_that_drops_the_documents_is_refused() -> None:
    inputs, _, _ = packed_inputs(torch.float32)
    with pytest.raises(ModelMismatchError, match="does not pass keyword arguments"):
        documents_attention(torch.nn.Identity(), *inputs, documents=None)


@pytest.mark.parametrize("extra", [{"softcap": 30.0}, {"s_aux": torch.zeros(4)}, {"sliding_window": 4}])
def test_arguments_that_packed_attention_lacks_are_refused(extra: dict[str, object]) -> None:
    inputs, documents, _ = packed_inputs(torch.float32)
    with pytest.raises(ModelMismatchError):
        documents_attention(torch.nn.Identity(), *inputs, documents=documents, **extra)  # type: ignore[arg-type]


def test_a_kernel_that_was_asked_for_is_taken_or_refused_never_replaced() -> None:
    inputs, documents, _ = packed_inputs(torch.float32)
    with pytest.raises(ConfigError, match=r"trainer.attention: varlen runs on a GPU in 16 bits, not on cpu"):
        documents_attention(torch.nn.Identity(), *inputs, documents=documents, kernel="varlen")
