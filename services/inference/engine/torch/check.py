"""``python -m services.inference.engine.torch.check MODEL [ADAPTER]``: says whether the torch engine runs a model, by its config.

Reads no weights. ``answer`` has the form of the answer. ``ADAPTER``: the recipe's section as JSON.
"""

from __future__ import annotations

import sys

from services.common.system.trial import answer


def trial() -> str:
    path, adapter = sys.argv[1], sys.argv[2:]
    import torch
    from transformers import AutoModelForCausalLM

    from services.common.config.training.adapter import AdapterConfig
    from services.common.lora import adapter_shapes
    from services.common.text.huggingface import load_config
    from services.inference.engine.torch.blocks import Adapter, check_targets
    from services.inference.engine.torch.decoder import check_supported

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(load_config(path))
    check_supported(model)
    if adapter:
        shapes = adapter_shapes(model, AdapterConfig.model_validate_json(adapter[0]))
        tensors = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
        check_targets(model, Adapter(tensors=tensors, scale=1.0))
    return ""


if __name__ == "__main__":
    answer(trial)
