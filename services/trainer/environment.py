"""Environment variables that libraries read when torch is imported: defaults for a trainer's process."""

from __future__ import annotations

from collections.abc import MutableMapping

# The allocator's name since torch 2.9, and its name before, which people still set.
ALLOCATOR, EARLIER_ALLOCATOR = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"


def set_defaults(environment: MutableMapping[str, str]) -> None:
    """Set what is not set. Call before the import of torch.

    Packed micro-batches differ in size, so blocks of a GPU's memory are cut into pieces that fit no later micro-batch.
    Expandable segments map free pages together instead; without a GPU the setting has no effect.
    """
    environment.setdefault("OMP_NUM_THREADS", "1")
    environment.setdefault("TOKENIZERS_PARALLELISM", "false")
    if EARLIER_ALLOCATOR not in environment:
        environment.setdefault(ALLOCATOR, "expandable_segments:True")
