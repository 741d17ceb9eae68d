"""``python -m services.trainer.model.check MODEL CONTEXT_LENGTH``: says whether the trainer computes a model right, by its config.

Reads no weights. Exit code 2 with the reason as the last line of stderr for a refusal; a line of stdout for a model that could
not be tried.
"""

from __future__ import annotations

import sys

from services.common.errors import UserError
from services.common.system.child import run_and_leave


def main() -> int:
    _, path, context_length = sys.argv
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from services.trainer.model.policy_model import architecture_limit
    from services.trainer.model.self_test import NoTinyCopyError

    try:
        try:
            config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
            with torch.device("meta"):
                AutoModelForCausalLM.from_config(config)
        except Exception as error:  # noqa: BLE001 - numbers of any author, read by the code of any architecture
            sys.stderr.write(f"config.json makes no model: {type(error).__name__}: {' '.join(str(error).split())}\n")
            return 2
        limit = architecture_limit(config)
        if limit is not None:
            limit.check(int(context_length))
    except NoTinyCopyError as reason:
        sys.stdout.write(
            f"no small model can be made of its config ({reason}), so the trainer compares it at its start\n"
        )
    except UserError as error:
        sys.stderr.write(f"{error.message}\n")
        return 2
    return 0


if __name__ == "__main__":
    run_and_leave(main)
