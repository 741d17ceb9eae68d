"""``python -m services.trainer.model.check MODEL CONTEXT_LENGTH``: says whether the trainer computes a model right, by its config.

Reads no weights. ``answer`` has the form of the answer: a note for a model that could not be tried.
"""

from __future__ import annotations

import sys

from services.common.system.trial import answer


def trial() -> str:
    _, path, context_length = sys.argv
    from services.common.text.huggingface import load_config
    from services.trainer.model.policy_model import architecture_limit
    from services.trainer.model.tiny_copy import NoTinyCopyError

    try:
        limit = architecture_limit(load_config(path))
    except NoTinyCopyError as reason:
        return f"no small model can be made of its config ({reason}), so the trainer compares it at its start"
    if limit is not None:
        limit.check(int(context_length))
    return ""


if __name__ == "__main__":
    answer(trial)
