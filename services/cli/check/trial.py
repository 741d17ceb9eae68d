"""``python -m services.cli.check.trial WHO MODEL SETTING``: says whether a service computes a model right, by its config.

``trainer`` gets the context length, ``engine`` (of torch) the recipe's section of the adapter as JSON, or null. Reads no
weights. Exit code 2 with the reason as the last line of stderr for a refusal; a line of stdout for a model that could not be
tried.
"""

from __future__ import annotations

import sys
from typing import Any

from services.common.errors import UserError
from services.common.system.child import run_and_leave


def main() -> int:
    who, path, setting = sys.argv[1:]
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        try:
            config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(config)
            if who == "engine":
                _check_engine(model, setting)
        except UserError:
            raise
        except Exception as error:  # noqa: BLE001 - numbers of any author, read by the code of any architecture
            sys.stderr.write(f"config.json makes no model: {type(error).__name__}: {' '.join(str(error).split())}\n")
            return 2
        if who == "trainer":
            _check_trainer(config, int(setting))
    except UserError as error:
        sys.stderr.write(f"{error.message}\n")
        return 2
    return 0


def _check_engine(model: Any, adapter: str) -> None:
    import torch
    from pydantic import TypeAdapter

    from services.common.config.training import AdapterConfig
    from services.common.lora import adapter_shapes
    from services.inference.engine.torch.blocks import Adapter, check_targets
    from services.inference.engine.torch.decoder import check_supported

    check_supported(model)
    if (asked := TypeAdapter(AdapterConfig | None).validate_json(adapter)) is not None:
        tensors = {name: torch.empty(shape, device="meta") for name, shape in adapter_shapes(model, asked).items()}
        check_targets(model, Adapter(tensors=tensors, scale=1.0))


def _check_trainer(config: Any, context_length: int) -> None:
    from services.trainer.model.policy_model import architecture_limit
    from services.trainer.model.self_test import NoTinyCopyError

    try:
        if (limit := architecture_limit(config)) is not None:
            limit.check(context_length)
    except NoTinyCopyError as reason:
        sys.stdout.write(
            f"no small model can be made of its config ({reason}), so the trainer compares it at its start\n"
        )


if __name__ == "__main__":
    run_and_leave(main)
