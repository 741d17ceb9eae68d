"""A decoder gives the log-probabilities of its model, in torch and in compiled code, before and after an update."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from services.common.weights.snapshot import named_weights
from services.inference.engine.base import WeightUpdate
from services.inference.engine.torch.decoder import Decoder, prepare
from tests.random_models import TOLERANCE, build_model, make_prompt, perturbed

KINDS = ("qwen3", "qwen2", "llama", "llama with biases")


def model_of(kind: str) -> Any:
    if kind != "llama with biases":
        return build_model(kind, tied=kind != "qwen2")
    from transformers import AutoModelForCausalLM

    config = build_model("llama").config
    config.attention_bias = config.mlp_bias = True
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def last_logprobs(decoder: Decoder, prompt: list[int]) -> torch.Tensor:
    """Log-probabilities after a prompt in two slots: a fresh pass, a continued one, and a decoding step."""
    tokens = torch.tensor([prompt, prompt])
    cut, last = len(prompt) // 2, len(prompt) - 1
    slots, none, cuts, lasts = np.arange(2), np.zeros(2, int), np.full(2, cut), np.full(2, last)
    with torch.inference_mode():
        decoder.cache.own(slots, none, lasts + 1)
        if decoder.extends_up_to:
            for begin, end in ((0, cut), (cut, last)):
                every = np.arange(begin, end)
                decoder.extend_each(
                    slots.repeat(end - begin), tokens[:, begin:end].flatten().numpy(), np.tile(every, 2)
                )
        else:
            decoder.extend(slots, tokens[:, :cut], none, fresh=True)
            decoder.extend(slots, tokens[:, cut:last], cuts, fresh=False)
        logits = decoder.decode(slots, tokens[:, last].numpy(), lasts)
    assert torch.allclose(logits[0], logits[1], atol=TOLERANCE)
    return logits[0].log_softmax(-1)


def expected(model: Any, prompt: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.tensor([prompt])).logits[0, -1].log_softmax(-1)


@pytest.mark.parametrize("kind", KINDS)
def test_a_decoder_gives_the_models_log_probabilities_before_and_after_an_update(kind: str, each_decoder: str) -> None:
    model, prompt = model_of(kind), make_prompt(31)
    new = perturbed(model)
    before, after = expected(model, prompt), expected(new, prompt)
    decoder = Decoder(model, num_slots=2, context_length=64)
    assert bool(decoder.extends_up_to) == (each_decoder == "compiled")
    assert (last_logprobs(decoder, prompt) - before).abs().max() <= TOLERANCE
    decoder.load(prepare(WeightUpdate.full(named_weights(new), 1), decoder.weights))
    assert (last_logprobs(decoder, prompt) - after).abs().max() <= TOLERANCE
    assert (before - after).abs().max() > 0.1
