"""The peak of one trainer rank's GPU memory at the true size of each recipe, by fake tensors, against `rollmill check`.

A fake tensor has a shape, a type and a storage of a size, and no memory. The rank builds its model as in a run, sharded by
FSDP2 over a fake process group; states of the optimizer and gradients are there, as in the middle of a minibatch. Then the
reference scores the largest micro-batch, and the policy passes it forwards and backwards. Every storage counts from its
creation to its end. The kernel is torch's varlen attention, so the shapes are those of a GPU.

Not counted: a CUDA context, NCCL's buffers and fragmentation, for which the estimate has an allowance that the comparison
leaves out, too. Moments in host memory are left out. ``check_error``: the worst
difference over the real recipes.

    python benchmarks/rehearsal_8b.py [--quick]
"""

from __future__ import annotations

import argparse
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from torch._subclasses import FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen3Config

from benchmarks._bench import report_facts
from services.cli.check.memory import GIB, ModelShape, trainer_rank_parts
from services.common.config.loading import load_recipe
from services.common.config.training import PolicyConfig
from services.trainer.model import attention, policy_model
from services.trainer.model.attention import Documents
from services.trainer.model.logprobs import CHUNK_TOKENS, Targets, token_logprobs
from services.trainer.model.optimizer import PolicyOptimizer
from services.trainer.model.policy_model import AdapterSetup, PolicyModel, Scorer, WithoutAdapter, build_policy_model
from services.trainer.ranks import Ranks

RECIPES = Path(__file__).resolve().parents[1] / "recipes"
HEAD_DIM = 128
_QUICK_CHUNK_TOKENS = 8192  # fewer blocks of the head; its blocks are not at the peak
_LARGE = 4_000_000_000  # parameters


class Storages(TorchDispatchMode):
    """Counts the bytes of all storages that operations create, and their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.peak = 0
        self._sizes: dict[int, int] = {}

    def note(self, tensor: torch.Tensor) -> None:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        storage = local.untyped_storage()
        if storage._cdata not in self._sizes:
            self._resized(storage._cdata, storage.nbytes())
            weakref.finalize(storage, self._ended, storage._cdata)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.note(leaf)
        return result

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Count meanwhile. FSDP2 frees and refills what it gathers by resizing its storage."""
        original = torch.UntypedStorage.resize_

        def resize(storage: torch.UntypedStorage, size: int) -> None:
            original(storage, size)
            if storage._cdata in self._sizes:
                self._resized(storage._cdata, size)

        with patch.object(torch.UntypedStorage, "resize_", resize), self:
            yield

    def _resized(self, key: int, size: int) -> None:
        self.bytes += size - self._sizes.get(key, 0)
        self._sizes[key] = size
        self.peak = max(self.peak, self.bytes)

    def _ended(self, key: int) -> None:
        self.bytes -= self._sizes.pop(key)


def memory_rows(quick: bool) -> dict[str, object]:
    """One row for each layout of the real recipes, and the worst relative difference as ``check_error``.

    ``quick`` computes the head in larger blocks, which the peak does not see.
    """
    rows = []
    for (name, _), (shape, policy, owners) in layouts().items():
        began = time.perf_counter()
        larger = quick and shape.num_parameters > _LARGE  # in a small model the blocks are at the peak
        peak, estimate = measured_and_estimated(shape, policy, _QUICK_CHUNK_TOKENS if larger else CHUNK_TOKENS)
        rows.append(
            {
                "model": name, "ranks": policy.trainer.num_ranks, "master_dtype": policy.trainer.master_dtype,
                "offload": list(policy.trainer.offload), "reference": policy.algorithm.needs_reference,
                "tokens": max(policy.trainer.token_budget, policy.model.context_length), "peak_gib": peak / GIB,
                "check_gib": estimate / GIB, "error": abs(estimate / peak - 1), "seconds": time.perf_counter() - began,
                "recipes": owners,
            }
        )  # fmt: skip
        row = rows[-1]
        print(
            f"{name}, {row['ranks']} ranks, {row['tokens']} tokens, {row['master_dtype']}, {len(owners)} policies as {owners[0]}: "
            f"peak {row['peak_gib']:.2f} GiB, check {row['check_gib']:.2f}, error {row['error']:.2%} ({row['seconds']:.0f} s)",
            flush=True,
        )
    return {"check_error": max(row["error"] for row in rows), "memory": rows}


def layouts() -> dict[tuple[str, str], tuple[ModelShape, PolicyConfig, list[str]]]:
    """The layouts of trained policies with GPUs of their own, by model and settings, with the recipes that have each."""
    found: dict[tuple[str, str], tuple[ModelShape, PolicyConfig, list[str]]] = {}
    for path in sorted(RECIPES.rglob("recipe.yaml")):
        for name, policy in load_recipe(path, (), {}).trained_policies.items():
            model = str(policy.model.path)
            shape = ModelShape.of(policy.model.path)
            if policy.trainer.gpus and shape is not None:
                relevant = {
                    "num_ranks",
                    "master_dtype",
                    "compute_dtype",
                    "gradient_checkpointing",
                    "offload",
                    "token_budget",
                }
                parts = trainer_rank_parts(shape, policy)
                key = f"{policy.trainer.model_dump_json(include=relevant)} {sorted(parts.items())}"
                found.setdefault((model, key), (shape, policy, []))[2].append(
                    f"{path.parent.relative_to(RECIPES)} {name}"
                )
    return found


def measured_and_estimated(
    shape: ModelShape, policy: PolicyConfig, chunk_tokens: int = CHUNK_TOKENS
) -> tuple[float, float]:
    """Peak of the storages, and the estimate without its allowance. Bytes."""
    parts = trainer_rank_parts(shape, policy)
    return peak_bytes(shape, policy, chunk_tokens), sum(parts.values()) - parts["allowance"]


def peak_bytes(shape: ModelShape, policy: PolicyConfig, chunk_tokens: int = CHUNK_TOKENS) -> float:
    """Peak of one rank's storages in the middle of a minibatch. Needs a process without a process group."""
    trainer = policy.trainer
    assert "reference" not in trainer.offload, "FSDP2's host offload needs real copies"
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=trainer.num_ranks)
    ranks = Ranks(rank=0, world_size=trainer.num_ranks, device=torch.device("cpu"))
    varlen = patch.object(attention, "_takes_varlen", lambda kernel, query: True)
    head = patch.object(policy_model, "token_logprobs", partial(token_logprobs, chunk_tokens=chunk_tokens))
    storages = Storages()
    try:
        with varlen, head:
            model = _model(shape, policy, ranks, trainable=True)
            reference = (
                _model(shape, policy, ranks, trainable=False)
                if policy.algorithm.needs_reference and policy.adapter is None
                else None
            )
            with FakeTensorMode(allow_non_fake_inputs=True), storages.watching():
                for built in (model, reference):
                    if built is not None:
                        _allocate(built, storages)
                scorer = WithoutAdapter(model) if policy.adapter is not None else reference
                _train(model, scorer if policy.algorithm.needs_reference else None, policy)
    finally:
        dist.destroy_process_group()
    return float(storages.peak)


def config_of(shape: ModelShape) -> Qwen2Config | Qwen3Config:
    """The configuration of a model of this shape."""
    sizes: dict[str, Any] = {
        "vocab_size": shape.vocabulary, "hidden_size": shape.hidden, "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.num_layers, "num_attention_heads": shape.queries // HEAD_DIM,
        "num_key_value_heads": shape.kv_width // HEAD_DIM, "tie_word_embeddings": shape.tied,
    }  # fmt: skip
    return Qwen3Config(head_dim=HEAD_DIM, **sizes) if shape.head_norms else Qwen2Config(**sizes)


def _model(shape: ModelShape, policy: PolicyConfig, ranks: Ranks, *, trainable: bool) -> PolicyModel:
    """On the meta device, sharded."""
    trainer = policy.trainer
    adapter = None
    dtype = getattr(torch, trainer.master_dtype if trainable else trainer.frozen_dtype)
    if trainable and policy.adapter is not None:
        adapter = AdapterSetup(config=policy.adapter, dtype=dtype, seed=0)
        dtype = getattr(torch, trainer.compute_dtype)  # of the frozen base
    with torch.device("meta"):
        causal_lm = AutoModelForCausalLM.from_config(config_of(shape), dtype=dtype)
    return build_policy_model(
        causal_lm,
        ranks,
        trainable=trainable,
        gradient_checkpointing=trainer.gradient_checkpointing,
        compute_dtype=None if trainer.compute_dtype == trainer.master_dtype else getattr(torch, trainer.compute_dtype),
        adapter=adapter,
    )


def _allocate(model: PolicyModel, storages: Storages) -> None:
    model.to_empty(device="cpu")
    model.causal_lm.tie_weights()
    for tensor in (*model.parameters(), *model.buffers()):
        storages.note(tensor)


def _train(model: PolicyModel, reference: Scorer | None, policy: PolicyConfig) -> None:
    """Gradients and moments are there; then one more micro-batch."""
    num_tokens = max(policy.trainer.token_budget, policy.model.context_length)
    optimizer = PolicyOptimizer(model.named_parameters(), policy.optimizer.model_copy(update={"schedule": "constant"}))
    for parameter in optimizer.parameters:
        parameter.grad = torch.empty_like(parameter)
    if "optimizer" in policy.trainer.offload:
        optimizer.adamw.state.clear()  # the moments are on the host
    documents = Documents.from_offsets(np.array([0, num_tokens]))
    token_ids = torch.zeros(num_tokens, dtype=torch.int64)
    every = np.arange(num_tokens - 1)
    targets = Targets.of(every, np.zeros_like(every), torch.device("cpu"), distinct=True)
    inputs = (token_ids, torch.zeros_like(token_ids), documents, targets, 1.0)
    if reference is not None:
        with torch.no_grad():
            reference(*inputs)
    logprobs, entropy = model(*inputs)
    (logprobs.sum() + entropy.sum()).backward()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="larger blocks of the vocabulary head")
    torch.set_num_threads(1)
    report_facts("rehearsal_8b", **memory_rows(parser.parse_args().quick))


if __name__ == "__main__":
    main()
