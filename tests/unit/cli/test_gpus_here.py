"""GPUs that a recipe names and this machine lacks are reported before any process starts, with the correction."""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path

import pytest

from services.cli.check import recipe as launch
from services.cli.check.recipe import gpu_problems, gpus_here, launch_problems
from services.common.config.loading import load_recipe
from services.common.config.recipe import Recipe
from services.common.installing import COMPLETE

REPOSITORY = Path(__file__).resolve().parents[3]


def recipe(*overrides: str) -> Recipe:
    """Inference on GPUs 0 to 3, the trainer on 4 to 7."""
    return load_recipe(REPOSITORY / "recipes/code/qwen3-8b-m2po-full", list(overrides), {})


def test_gpus_that_are_not_there_are_named_with_the_key_and_those_that_are() -> None:
    (line,) = gpu_problems(recipe(), [80.0] * 6)
    assert line.startswith("policies.model0.trainer.gpus names GPU 6, 7, but this machine has the GPUs 0 to 5")


def test_a_machine_without_a_gpu_says_so_for_each_section() -> None:
    lines = gpu_problems(recipe(), [])
    assert [line.partition(" is ")[0] for line in lines] == ["inference.a.gpus", "policies.model0.trainer.gpus"]
    assert all("no NVIDIA GPU" in line for line in lines)


def test_a_device_that_is_cuda_is_told_where_there_is_no_gpu() -> None:
    overrides = ["inference.a.device=cuda", "policies.model0.trainer.device=cuda"]
    quickstart = load_recipe(REPOSITORY / "recipes/quickstart", overrides, {})
    lines = gpu_problems(quickstart, [])
    assert [line.partition(" is ")[0] for line in lines] == ["inference.a.device", "policies.model0.trainer.device"]
    assert all("no NVIDIA GPU" in line and "write cpu or auto" in line for line in lines)
    assert gpu_problems(quickstart, [80.0]) == []


def test_less_memory_than_the_recipe_counts_with_is_told_with_the_number_to_write() -> None:
    lines = gpu_problems(recipe(), [80.0, 80.0, 23.7, 80.0, *[80.0] * 4])
    assert len(lines) == 1
    assert "inference.a.gpus: GPU 2 has 23.7 GiB" in lines[0] and "write 23 there" in lines[0]


def test_the_driver_is_asked_and_its_absence_is_no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpus_here() == []
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 81559, GPU-aa11\necho 24576, GPU-bb22\n")
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert [round(size, 1) for size in gpus_here()] == [79.6, 24.0]
    for shown, sizes in (("1", [24.0]), ("GPU-bb,0", [24.0, 79.6]), ("", []), ("7", []), ("0,MIG-1", [79.6])):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
        assert [round(size, 1) for size in gpus_here()] == sizes, shown
    tool.write_text("#!/bin/sh\nprintf 'caf\\351\\n24576, GPU-cc\\n'\n")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert gpus_here() == [24.0]


def test_a_card_too_small_is_told_with_the_figure_and_the_settings_that_help(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.cli.check.recipe.gpus_here", lambda: [16.0] * 8)
    text = "\n".join(launch_problems(recipe()))
    assert "has 16.0 GiB, but the recipe counts with 80" in text
    for needed in (
        "trainer-model0 needs", "but has 16.0", "adapter: {rank: ", "trainer.offload: [optimizer, reference] (", "GiB)",
        "inference-a: 4 × model0 needs", "tensor_parallel", "memory_share", "context_length",
    ):  # fmt: skip
        assert needed in text, needed


def test_an_interpreter_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.cli.check.recipe.gpus_here", lambda: [80.0] * 8)
    lines = launch._interpreter_problems(recipe("inference.a.sglang.python=/nowhere/bin/python"), has_gpus=True)
    assert "inference.a: sglang.python: there is no interpreter /nowhere/bin/python" in "\n".join(lines)


@pytest.mark.parametrize("engine", ["sglang"])
def test_an_environment_of_servers_that_cannot_be_used_is_told_with_the_target_that_makes_it(
    engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interpreters whose packages are files of a test: none, a torch that does not load, one for CPUs, one for CUDA."""
    monkeypatch.setattr("services.cli.check.recipe.gpus_here", lambda: [80.0] * 8)
    monkeypatch.setattr("services.inference.engine.served.process.ROOT", tmp_path)
    monkeypatch.delenv(f"ROLLMILL_{engine.upper()}_PYTHON", raising=False)
    place = tmp_path / f".venv-{engine}"
    python = place / "bin" / "python"
    python.parent.mkdir(parents=True)
    packages = tmp_path / "packages"
    (packages / engine).mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nPYTHONPATH={packages} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    torch = packages / "torch.py"

    def told() -> str:
        launch._error_of.cache_clear()
        lines = launch._interpreter_problems(recipe(f"inference.a.engine={engine}"), has_gpus=True)
        return "\n".join(line for line in lines if line.startswith("inference.a.engine"))

    begins, remedy = f"inference.a.engine is {engine}, but ", f"run `make {engine}-env in {REPOSITORY}`"
    assert f"{begins}the package {engine} is not installed for {sys.executable}: {remedy}" in told()  # not complete
    (place / COMPLETE).touch()
    torch.write_text("raise ImportError('libcudnn.so.9: cannot open shared object file')\n")
    assert f"{begins}ImportError: libcudnn.so.9: cannot open shared object file: {remedy}" in told()
    torch.write_text("__version__ = '2.13.0+cpu'\nclass version: cuda = None\n")
    assert f"{begins}torch 2.13.0+cpu of {sys.executable} is built for CPUs: {remedy}" in told()
    torch.write_text("class version: cuda = '13.0'\n")
    assert told() == ""
