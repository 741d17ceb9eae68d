"""Faults of numerics for ``numerics_gate.py``, put into the process in which each would occur.

A ``sitecustomize`` in PYTHONPATH calls ``install``; the variable NUMERICS_FAULT names the fault. A module of services/ is
changed when it has been imported, so that processes that never import torch stay as they are.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import math
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

FAULT = "NUMERICS_FAULT"
OTHER_BASE = 30.0  # times as high
HOTTER = 1.1


def _packing(micro_batches: Any) -> None:
    """The trainer's attention does not know where documents end."""
    import numpy as np

    from services.trainer.model.attention import Branch

    documents = micro_batches.Documents
    micro_batches.Documents = lambda branches, device: documents(
        (Branch(0, branches[-1].end, np.zeros(0, dtype=np.int64)),), device
    )


def _rope(blocks: Any) -> None:
    tables = blocks._rope_tables

    def other(model: Any, *arguments: Any) -> Any:
        frequencies = model.model.rotary_emb.inv_freq
        num = len(frequencies)
        base = float(frequencies[-1]) ** (-num / (num - 1))
        frequencies.pow_(math.log(base * OTHER_BASE) / math.log(base))
        return tables(model, *arguments)

    blocks._rope_tables = other


def _reads(change: Callable[[Any], Any]) -> Callable[[Any], None]:
    """The engine computes another request than it was given."""

    def patch(core: Any) -> None:
        submit = core.Core.submit

        def changed(self: Any, entry: Any) -> None:
            entry.request = change(entry.request)
            submit(self, entry)

        core.Core.submit = changed

    return patch


def _without_opening(request: Any) -> Any:
    """The template of another model: without the opening of the answer, of which <|im_start|> is a token."""
    ids = request.prompt_ids
    start = max(i for i, token in enumerate(ids) if token == ids[0])
    return replace(request, prompt_ids=ids[:start])


def _hotter(request: Any) -> Any:
    sampling = request.sampling
    return replace(request, sampling=replace(sampling, temperature=HOTTER * sampling.temperature))


def _stale(decoder: Any) -> None:
    decoder.Decoder.load = lambda self, prepared: None


def _half(decoder: Any) -> None:
    import torch

    init = decoder.Decoder.__init__

    def rounded(self: Any, model: Any, **settings: Any) -> None:
        init(self, model.to(torch.bfloat16), **settings)

    decoder.Decoder.__init__ = rounded


def _no_adapter(blocks: Any) -> None:
    blocks.LowRank.merged = lambda self, weight: weight
    blocks.LowRank.add_to = lambda self, out, x: None


def _old_head(step: Any) -> None:
    pack = step.NativeStep._pack

    def once(self: Any, weight: Any, norm: Any, panels: Any) -> None:
        if panels is not self._head or not getattr(self, "packed_once", False):
            pack(self, weight, norm, panels)
        self.packed_once = panels is self._head or getattr(self, "packed_once", False)

    step.NativeStep._pack = once


def _shuffled(blocks: Any) -> None:
    fuse = blocks._fuse_layers
    blocks._fuse_layers = lambda *arguments: fuse(*arguments)[::-1]


ENGINE = "services.inference.engine.torch"
FAULTS: dict[str, tuple[str, Callable[[Any], None]]] = {
    "packing": ("services.trainer.model.micro_batches", _packing),
    "rope_base": (f"{ENGINE}.blocks", _rope),
    "template": (f"{ENGINE}.engine", _reads(_without_opening)),
    "stale_replica": (f"{ENGINE}.decoder", _stale),
    "adapter_not_applied": (f"{ENGINE}.blocks", _no_adapter),
    "head_not_repacked": ("extras.compiled.step", _old_head),
    "temperature": (f"{ENGINE}.engine", _reads(_hotter)),
    "half_precision": (f"{ENGINE}.decoder", _half),
    "shuffled_layer": (f"{ENGINE}.blocks", _shuffled),
    "one_token_more": (f"{ENGINE}.engine", _reads(lambda r: replace(r, prompt_ids=(r.prompt_ids[0], *r.prompt_ids)))),
}


class _Patched(importlib.abc.MetaPathFinder):
    """Finds one module as usual, and changes it after it was executed."""

    def __init__(self, name: str, patch: Callable[[ModuleType], None]) -> None:
        self._name, self._patch = name, patch

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name != self._name:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        assert spec is not None and spec.loader is not None
        execute, patch = spec.loader.exec_module, self._patch

        def both(module: ModuleType) -> None:
            execute(module)
            patch(module)

        spec.loader.exec_module = both  # type: ignore[method-assign]
        return spec


def install() -> None:
    if fault := os.environ.get(FAULT):
        sys.meta_path.insert(0, _Patched(*FAULTS[fault]))
