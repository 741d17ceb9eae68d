"""``python -m services.inference.engine.torch.check MODEL [ADAPTER]``: says whether the torch engine runs a model, by its config.

Reads no weights. Exit code 2 with the reason as the last line of stderr for a refusal. ``ADAPTER``: the recipe's section as JSON.
"""

from __future__ import annotations

import sys

from services.common.errors import UserError
from services.common.system.child import run_and_leave


def main() -> int:
    path, adapter = sys.argv[1], sys.argv[2:]
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from services.common.config.training import AdapterConfig
    from services.common.lora import adapter_shapes
    from services.inference.engine.torch.blocks import Adapter, check_targets
    from services.inference.engine.torch.decoder import check_supported

    try:
        with torch.device("meta"):
            config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
            model = AutoModelForCausalLM.from_config(config)
        check_supported(model)
        if adapter:
            asked = AdapterConfig.model_validate_json(adapter[0])
            shapes = adapter_shapes(model, asked)
            tensors = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
            check_targets(model, Adapter(tensors=tensors, scale=1.0))
    except UserError as error:
        sys.stderr.write(f"{error.message}\n")
        return 2
    except Exception as error:  # noqa: BLE001 - numbers of any author, read by the code of any architecture
        sys.stderr.write(f"config.json makes no model: {type(error).__name__}: {' '.join(str(error).split())}\n")
        return 2
    return 0


if __name__ == "__main__":
    run_and_leave(main)
