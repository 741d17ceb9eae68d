"""Host memory, /dev/shm and caches of embedded engines: estimated from the recipe, refused with figures and keys."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from services.cli.check import memory as host
from services.cli.check.memory import (
    GIB,
    ModelShape,
    embedded_engine_parts,
    host_estimates,
    host_problems,
    misfits,
    shared_memory_gib,
    small_caches,
)
from services.cli.check.recipe import check_launch
from services.common.config.loading import load_recipe
from services.common.config.processes import InferenceConfig
from services.common.config.recipe import Recipe
from services.common.errors import ConfigError

RECIPES = Path(__file__).resolve().parents[3] / "recipes"
QWEN3_8B = ModelShape.by_name("Qwen/Qwen3-8B")
VERSION = 2 * 8_190_735_360


def recipe(tmp_path: Path, model: str = "Qwen/Qwen3-8B", **sections: Any) -> Recipe:
    """A recipe of one policy and one service; ``weights``, ``trainer`` and ``inference`` are their keys."""
    trainer = {"compute_dtype": "bfloat16", "gpus": [0, 1, 2, 3], "num_ranks": 4, "device": "cuda"}
    trainer |= {"gradient_checkpointing": True, "token_budget": 4096}
    trainer |= sections.get("trainer", {})
    policy = {
        "model": {"path": model, "context_length": 16_384},
        "trainer": trainer,
        "weights": {"publish_dtype": "bfloat16", **sections.get("weights", {})},
        "adapter": sections.get("adapter"),
    }
    tree = {
        "name": "test",
        "extends": str(RECIPES / "quickstart" / "recipe.yaml"),
        "policies": {"model0": policy},
        "inference": {"a": {"engine": "sglang", "device": "cuda", "gpus": [4], **sections.get("inference", {})}},
    }
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump(tree))
    return load_recipe(file, (), {})


def test_versions_and_stage_are_counted_in_shared_memory(tmp_path: Path) -> None:
    estimate = host_estimates(recipe(tmp_path), has_gpus=True)[0]
    assert estimate.shared == {"5 versions of model0": 5 * VERSION, "stage of a model0": VERSION}
    assert not [part for part in estimate.memory if part.startswith("mirror")], "mapped from the snapshot"
    by_vllm = host_estimates(recipe(tmp_path, inference={"engine": "vllm"}), has_gpus=True)[0]
    assert by_vllm.shared == estimate.shared
    full = host_estimates(recipe(tmp_path, weights={"transfer": "full", "keep_versions": 1}), has_gpus=True)[0]
    assert full.shared["3 versions of model0"] == 3 * VERSION
    delta = host_estimates(recipe(tmp_path, weights={"transfer": "delta"}), has_gpus=True)[0]
    assert delta.memory["mirror of a model0"] == VERSION


def test_shm_size_follows_from_the_recipe(tmp_path: Path) -> None:
    assert shared_memory_gib(recipe(tmp_path), 0) == 101  # 6 * 15.26 GiB and a tenth
    assert shared_memory_gib(recipe(tmp_path, model="Qwen/Qwen3-0.6B"), 0) < 10
    assert shared_memory_gib(recipe(tmp_path), 7) == 1, "a node without weights"


@pytest.mark.parametrize(
    ("memory_gib", "shared_gib", "told"),
    [
        (2000, 200, []),
        (20, 200, ["node 0 needs about"]),
        (2000, 64, ["/dev/shm of node 0 needs about 91.5 GiB"]),
        (20, 0, ["node 0 needs about", "/dev/shm of node 0"]),
    ],
)
def test_a_machine_with_too_little_is_told_the_figures_and_the_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, memory_gib: int, shared_gib: int, told: list[str]
) -> None:
    monkeypatch.setattr(host, "host_memory_bytes", lambda: memory_gib * GIB)
    monkeypatch.setattr(host, "shared_memory_here", lambda: shared_gib * GIB)
    problems = host_problems(recipe(tmp_path), has_gpus=True)
    assert len(problems) == len(told)
    for problem, begin in zip(problems, told, strict=True):
        assert begin in problem
        assert all(
            key in problem for key in ("weights.", "5 versions" if "/dev/shm of" in problem else "keep_versions")
        )


def test_a_machine_without_a_gpu_is_told_to_try_the_tiny_profile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "host_memory_bytes", lambda: 20 * GIB)
    monkeypatch.setattr(host, "shared_memory_here", lambda: 200 * GIB)
    told = "this machine has 20.0 and no NVIDIA GPU: run on one that has, try the recipe with --profile tiny, or write policies."
    assert [told in problem for problem in host_problems(recipe(tmp_path), has_gpus=False)] == [True]
    assert not any("tiny" in problem for problem in host_problems(recipe(tmp_path), has_gpus=True))


def test_a_spill_directory_is_a_choice_and_small_versions_may_spill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "host_memory_bytes", lambda: 2000 * GIB)
    monkeypatch.setattr(host, "shared_memory_here", lambda: 64 << 20)  # a container's default
    assert not host_problems(recipe(tmp_path, weights={"spill_directory": "/mnt/nvme"}), has_gpus=True)
    assert not host_problems(load_recipe(RECIPES / "quickstart" / "recipe.yaml", (), {}), has_gpus=False)


def test_the_cache_of_an_embedded_engine_is_refused_where_it_cannot_fit(tmp_path: Path) -> None:
    assert QWEN3_8B is not None
    service = InferenceConfig(engine="torch", dtype="bfloat16", num_slots=64)
    assert embedded_engine_parts(QWEN3_8B, service, 16_384)["KV cache"] == 8 * GIB
    enough = service.model_copy(update={"kv_cache_gib": 200.0})
    assert embedded_engine_parts(QWEN3_8B, enough, 16_384)["KV cache"] == 64 * 16_384 * 2 * 36 * 1024 * 2
    large = recipe(tmp_path, inference={"engine": "torch", "dtype": "bfloat16", "num_slots": 64, "kv_cache_gib": 200})
    (line,) = misfits(large)
    assert "KV cache 144.0" in line and "launch.gpu_memory_gib: 80" in line
    assert all(key in line for key in ("inference.a.kv_cache_gib", "context_length", "inference.a.dtype"))
    with pytest.raises(ConfigError, match=r"KV cache 144\.0"):
        check_launch(large)
    bounded = recipe(tmp_path, inference={"engine": "torch", "dtype": "bfloat16", "num_slots": 64, "kv_cache_gib": 40})
    assert not misfits(bounded)


def test_a_cache_that_holds_no_sequence_is_refused_with_the_least_that_does(tmp_path: Path) -> None:
    settings = {"engine": "torch", "dtype": "bfloat16", "num_slots": 64, "kv_cache_gib": 2.0}
    (line,) = small_caches(recipe(tmp_path, inference=settings))
    assert line.startswith("inference.a, policy model0: kv_cache_gib is 2, and one sequence of 16384 tokens needs 2.26")
    assert "raise kv_cache_gib to at least 2.26, or lower policies.*.model.context_length" in line
    with pytest.raises(ConfigError, match="one sequence of 16384 tokens"):
        check_launch(recipe(tmp_path, inference=settings))
    assert not small_caches(recipe(tmp_path, inference={**settings, "kv_cache_gib": 2.27}))
    assert not small_caches(recipe(tmp_path, inference={**settings, "engine": "sglang"}))
    assert not small_caches(recipe(tmp_path, model=None, inference=settings))


@pytest.mark.parametrize("model", ["somebody/unnamed", None])
def test_a_model_of_unknown_size_is_not_estimated(tmp_path: Path, model: str | None) -> None:
    unknown = recipe(tmp_path, model=model)  # type: ignore[arg-type]
    assert all(not found.shared for found in host_estimates(unknown, has_gpus=True).values())
    assert shared_memory_gib(unknown, 0) == 8
