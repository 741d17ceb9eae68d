"""Measures which share of the weights AdamW moves at each recipe's learning rate and master type.

An update smaller than half the distance between two neighbouring numbers of the master type is lost: at a learning rate
of 5e-6, a bfloat16 weight of 0.02 has neighbours 1.2e-4 away. Each recipe's optimizer runs 100 updates over a matrix whose
start values bfloat16 can represent, like those of a checkpoint: normal, deviation 0.02. The gradient of a weight is a
constant of its own plus noise of three times that size at each update.

    moved      share of master weights that differ from the start; none may be under 0.9
    cosine     between the change of the weights and that with float32 masters
    published  share of weights that differ in a published bfloat16 version

``ours`` is the least ``moved`` of all recipes, ``theirs`` the least when the same recipes have bfloat16 masters.

    python benchmarks/update_share.py [--quick] [--updates 100] [--seed 7]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks._bench import report
from services.common.config.loading import load_recipe
from services.common.config.training import OptimizerConfig
from services.trainer.model.optimizer import PolicyOptimizer

RECIPES = Path(__file__).resolve().parents[1] / "recipes"
LEAST_MOVED = 0.9
DEVIATION = 0.02  # of a large model's weights
NOISE = 3.0  # of a gradient, over its mean

Setting = tuple[OptimizerConfig, str, bool]  # optimizer, master type, moments on the host


def settings() -> dict[Setting, list[str]]:
    """The distinct settings of all recipes, each with the policies that have it."""
    found: dict[Setting, list[str]] = {}
    for path in sorted(RECIPES.rglob("recipe.yaml")):
        recipe = load_recipe(path, (), {})
        for name, policy in recipe.trained_policies.items():
            optimizer = recipe.optimizer(name)
            if optimizer.schedule == "constant":  # the length of the run then has no influence
                optimizer = optimizer.model_copy(update={"total_updates": None})
            key = (optimizer, policy.trainer.master_dtype, "optimizer" in policy.trainer.offload)
            found.setdefault(key, []).append(f"{path.parent.relative_to(RECIPES)} {name}")
    return found


def change(config: OptimizerConfig, dtype: str, offload: bool, updates: int, width: int, seed: int) -> torch.Tensor:
    """The change of every weight after ``updates`` updates. [width * width] float64"""
    generator = torch.Generator().manual_seed(seed)
    start = (DEVIATION * torch.randn(width, width, generator=generator)).bfloat16()
    mean = torch.randn(width, width, generator=generator)
    weight = torch.nn.Parameter(start.to(getattr(torch, dtype), copy=True))
    optimizer = PolicyOptimizer([("weight", weight)], config, offload=offload)
    for _ in range(updates):
        weight.grad = (mean + NOISE * torch.randn(width, width, generator=generator)).to(weight.dtype)
        optimizer.update()
    moved = weight.detach().double() - start.double()
    return moved.flatten()


def row(setting: Setting, updates: int, width: int, seed: int) -> dict[str, Any]:
    config, dtype, offload = setting
    exact = change(config, "float32", offload, updates, width, seed)
    own = exact if dtype == "float32" else change(config, dtype, offload, updates, width, seed)
    coarse = own if dtype == "bfloat16" else change(config, "bfloat16", offload, updates, width, seed)
    start = (DEVIATION * torch.randn(width, width, generator=torch.Generator().manual_seed(seed))).bfloat16().flatten()
    published = (start.double() + own).bfloat16()
    return {
        "lr": config.lr, "master_dtype": dtype, "offload": ["optimizer"] if offload else [],
        "moved": share(own != 0), "cosine": cosine(own, exact), "published": share(published != start),
        "moved_bfloat16": share(coarse != 0), "cosine_bfloat16": cosine(coarse, exact),
    }  # fmt: skip


def share(chosen: torch.Tensor) -> float:
    return float(chosen.double().mean())


def cosine(one: torch.Tensor, other: torch.Tensor) -> float:
    return float(torch.nn.functional.cosine_similarity(one, other, dim=0))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a matrix of 256 rows instead of 2048")
    parser.add_argument("--updates", type=int, default=100)
    parser.add_argument("--seed", type=int, default=7)
    options = parser.parse_args()
    torch.set_num_threads(1)
    width = 256 if options.quick else 2048
    rows = []
    print(f"{'lr':>8} {'masters':>9} {'moved':>7} {'cosine':>7} {'published':>9} {'as bfloat16':>12}  policies")
    for setting, policies in settings().items():
        found = row(setting, options.updates, width, options.seed)
        rows.append({**found, "policies": policies})
        print(
            f"{found['lr']:8.1e} {found['master_dtype']:>9} {found['moved']:7.1%} {found['cosine']:7.3f} "
            f"{found['published']:9.1%} {found['moved_bfloat16']:12.1%}  {len(policies)}: {policies[0]}"
        )
    least = min(found["moved"] for found in rows)
    coarse = min(found["moved_bfloat16"] for found in rows)
    report(
        "update_share", least, coarse, least / coarse, None, unit="share of weights moved", updates=options.updates,
        target={"moved": LEAST_MOVED}, rows=rows,
    )  # fmt: skip
    return 0 if least >= LEAST_MOVED else 1


if __name__ == "__main__":
    sys.exit(main())
