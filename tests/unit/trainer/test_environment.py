from __future__ import annotations

from pathlib import Path

import pytest
import torch

from services.trainer.config import ALLOCATOR, EARLIER_ALLOCATOR, set_defaults


def test_segments_expand_unless_the_environment_says_something_else() -> None:
    environment: dict[str, str] = {}
    set_defaults(environment)
    assert environment["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        chosen = {name: "max_split_size_mb:128"}
        set_defaults(chosen)
        assert {key: value for key, value in chosen.items() if "ALLOC" in key} == {name: "max_split_size_mb:128"}


def test_torch_knows_the_variable_and_the_key() -> None:
    with pytest.raises(ValueError, match="Expected 'True' or 'False'"):  # so the value is parsed, and not skipped
        torch._C._accelerator_setAllocatorSettings("expandable_segments:Maybe")
    paths = (Path(torch.__file__).parent / "lib").glob("lib*.so")
    small = [path.read_bytes() for path in paths if path.stat().st_size < 1 << 22]
    environment: dict[str, str] = {}
    set_defaults(environment)
    assert ALLOCATOR in environment
    for word in (ALLOCATOR, EARLIER_ALLOCATOR, "expandable_segments"):
        assert any(word.encode() in library for library in small), word
