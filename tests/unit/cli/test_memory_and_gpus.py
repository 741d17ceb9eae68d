"""Settings that are `auto` follow from the GPUs of the machine; memory is estimated before a start, and what does not fit is refused."""

from __future__ import annotations

import json
import os
import re
import runpy
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner, Result

from services.cli.__main__ import app
from services.cli.check import memory as host
from services.cli.check import recipe as launch
from services.cli.check.memory import (
    GIB,
    ModelShape,
    embedded_engine_parts,
    engine_parts,
    estimates,
    host_estimates,
    host_problems,
    misfits,
    shared_memory_gib,
    small_caches,
)
from services.cli.check.recipe import check_launch, gpu_problems, gpus_here, launch_problems, on_this_machine
from services.cli.plan import plan
from services.common.config.loading import load_recipe
from services.common.config.processes import InferenceConfig, Placement
from services.common.config.recipe import Recipe
from services.common.errors import ConfigError
from services.common.installing import COMPLETE
from tests.documented import files

SMOL_135M = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 576, "num_hidden_layers": 30,
    "intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152,
    "tie_word_embeddings": True, "max_position_embeddings": 8192,
}  # fmt: skip
Machine = Callable[..., None]


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Give the machine GPUs of so many MiB, by an `nvidia-smi` of its own; torch can use them unless ``torch_error``."""

    def make(*mib: int, torch_error: str = "") -> None:
        folder = tmp_path / "driver"
        folder.mkdir(exist_ok=True)
        tool = folder / "nvidia-smi"
        tool.write_text("#!/bin/sh\n" + "".join(f"echo {size}, GPU-{n}\n" for n, size in enumerate(mib)))
        tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("PATH", f"{folder}{os.pathsep}/usr/bin{os.pathsep}/bin")
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        monkeypatch.setattr(launch, "_error_of", lambda python, program: torch_error)
        monkeypatch.setattr("services.cli.check.memory.host_memory_bytes", lambda: 200 * GIB)

    return make


@pytest.fixture
def guide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The recipe of docs/train-my-model.md, as its reader writes it."""
    for name, text in files("train-my-model.md").items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    runpy.run_path(str(tmp_path / "mine/make_data.py"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "mine" / "recipe.yaml"


def rollmill(*arguments: str) -> Result:
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, list(arguments))


def loaded(path: Path, *settings: str) -> Recipe:
    return on_this_machine(load_recipe(path, settings, {}))


def written(folder: Path, **sections: Any) -> Path:
    """A recipe without GPUs and without other settings than these."""
    tree = {
        "extends": "base",
        "policies": {"model0": {"model": {"path": "Qwen/Qwen3-0.6B"}, **sections.pop("policy", {})}},
        "data": {"train": {"path": "rows.jsonl"}},
        "evaluation": {"at_start": False, "at_end": False},
        **sections,
    }
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


@pytest.mark.parametrize(("cards", "placement"), [([24576], "shared"), ([81559], "shared"), ([81559] * 8, "apart")])
def test_the_recipe_of_the_guide_fits_the_card_and_check_shows_how(
    guide: Path, machine: Machine, cards: list[int], placement: str
) -> None:
    machine(*cards)
    shown = rollmill("check", str(guide), "--show")
    assert shown.exit_code == 0, shown.output
    needed = [float(total) for total in re.findall(rf"([\d.]+) of {cards[0] // 1024}\b", shown.stdout)]
    assert len(needed) == 2 and all(5 < total < cards[0] / 1024 for total in needed)
    assert "GPU 0" in shown.stdout and "KV cache" in shown.stdout and "activations" in shown.stdout
    resolved = yaml.safe_load(shown.stdout.partition("my-model is")[0])
    assert resolved["placement"] == placement
    trainer, engine = resolved["policies"]["model0"]["trainer"], resolved["inference"]["a"]
    assert (trainer["device"], trainer["compute_dtype"], trainer["master_dtype"]) == ("cuda", "bfloat16", "float32")
    assert trainer["gradient_checkpointing"] is True
    assert (engine["device"], engine["dtype"]) == ("cuda", "bfloat16")


def test_what_shares_a_card_is_added_up_and_refused_with_the_remedy(guide: Path, machine: Machine) -> None:
    machine(*[24576] * 8)
    refused = rollmill("check", str(guide))
    assert isinstance(refused.exception, ConfigError)
    text = str(refused.exception)
    parts = re.findall(r"(\S+) needs ([\d.]+) GiB on each GPU of node 0 \(.*other processes ([\d.]+)\)", text)
    assert [process for process, _, _ in parts] == ["trainer-model0", "inference-a"]
    assert len({total for _, total, _ in parts}) == 1, "both have the sum"
    assert (
        "write GPUs of its own, as policies.*.trainer.gpus: [0] and inference.*.gpus: [1]" in text
        and "placement: shared" in text
    )
    apart = ("--set", "inference.a.gpus=[0]", "--set", "policies.model0.trainer.gpus=[1]")
    assert rollmill("check", str(guide), *apart).exit_code == 0


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ((), Placement.SHARED),
        (("placement=apart",), Placement.APART),
        (("inference.a.gpus=[0]",), Placement.APART),
        (("inference.a.device=cpu",), Placement.APART),
        (("policies.model0.trainer.device=cpu",), Placement.APART),
        (("inference.a.engine=sglang",), Placement.APART),
        (("inference.a.engine=scripted",), Placement.APART),
        (("inference.a.node=1",), Placement.APART),
        (("run.steps=0", "placement=auto"), Placement.APART),
    ],
)
def test_one_card_is_shared_where_both_halves_take_it_unnamed(
    tmp_path: Path, machine: Machine, settings: tuple[str, ...], expected: Placement
) -> None:
    machine(24576)
    assert loaded(written(tmp_path, run={"steps": 3}), *settings).placement is expected


def test_without_a_gpu_all_is_as_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "gpus_here", list)
    recipe = loaded(written(tmp_path))
    trainer, service = recipe.policies["model0"].trainer, recipe.inference["a"]
    assert (trainer.device, trainer.compute_dtype, trainer.gradient_checkpointing) == ("cpu", "float32", False)
    assert (service.device, service.dtype, recipe.placement) == ("cpu", "float32", Placement.APART)
    assert recipe.launch.gpu_memory_gib == 80.0
    assert all(spec.forked for spec in plan(recipe, tmp_path) if spec.name in ("inference-a", "trainer-model0"))


def test_a_gpu_that_nvidia_smi_does_not_tell_is_left_to_the_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part of a GPU (MIG), or a container without `nvidia-smi`: the driver is there, and torch may see a device."""
    monkeypatch.setattr(launch, "gpus_here", list)
    monkeypatch.setattr(launch.os.path, "exists", lambda place: place == "/proc/driver/nvidia/gpus")
    recipe = loaded(written(tmp_path))
    assert (recipe.inference["a"].device, recipe.policies["model0"].trainer.device) == ("auto", "auto")
    assert not [line for line in launch_problems(recipe) if "NVIDIA" in line]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # no GPU is wanted
    assert loaded(written(tmp_path)).inference["a"].device == "cpu"


@pytest.mark.parametrize("size", ["1.5", "8"])
def test_the_gib_that_a_setting_leaves_on_a_shared_card_are_true(tmp_path: Path, machine: Machine, size: str) -> None:
    machine(24576)
    recipe = loaded(written(tmp_path), f"policies.model0.model.path=Qwen/Qwen3-{size}B", "placement=shared")
    lines = misfits(recipe)
    line = next(line for line in lines if line.startswith("trainer-model0"))
    named = re.findall(r"(policies\.model0\.[\w.]+): (.+?) \(([\d.]+) GiB\)", line)
    assert named, line
    for key, value, said in named:
        model = f"policies.model0.model.path=Qwen/Qwen3-{size}B"
        changed = loaded(written(tmp_path), model, "placement=shared", f"{key}={value}")
        found = estimates(changed)
        then = next(estimate.total for estimate in found if estimate.process == "trainer-model0")
        assert float(said) == pytest.approx(then / GIB, abs=0.05), (key, value)


CPU_BUILD = "AssertionError: Torch not compiled with CUDA enabled"
OLD_DRIVER = (
    "RuntimeError: The NVIDIA driver on your system is too old (found version 12020). Please update your GPU driver"
)


@pytest.mark.parametrize("error", [CPU_BUILD, OLD_DRIVER])
@pytest.mark.parametrize("settings", [(), ("inference.a.gpus=[0]", "policies.model0.trainer.gpus=[1]")])
def test_a_torch_that_cannot_use_the_gpu_is_told_before_the_run(
    tmp_path: Path, machine: Machine, error: str, settings: tuple[str, ...]
) -> None:
    machine(81559, 81559, torch_error=error)
    told = [line for line in launch_problems(loaded(written(tmp_path), *settings)) if "cannot use the GPU" in line]
    assert [line.partition(" ")[0] for line in told] == ["inference.a.device", "policies.model0.trainer.device"]
    assert all(error in line and "device: cpu" in line for line in told)
    on_cpu = ("inference.a.device=cpu", "policies.model0.trainer.device=cpu")
    assert "cannot use the GPU" not in str(launch_problems(loaded(written(tmp_path), *on_cpu)))


def small_model(tmp_path: Path) -> str:
    folder = tmp_path / "model"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(SMOL_135M))
    return str(folder)


def on_cpu(tmp_path: Path, **policy: Any) -> Recipe:
    model = {"path": small_model(tmp_path), "context_length": policy.pop("context", 128)}
    path = written(tmp_path, policy={"model": model, "trainer": {"device": "cpu"}, **policy})
    return load_recipe(path, ["inference.a.device=cpu", "rollout.group_size=8"], {})


def test_the_setting_that_saves_most_is_named_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.cli.check.memory.host_memory_bytes", lambda: 8 * GIB)
    (line,) = host_problems(on_cpu(tmp_path, batch={"size": 512}, context=512), has_gpus=False)
    named = re.findall(r"(\S+?): (.+?) \(([\d.]+) GiB\),", line.partition("or write ")[2])
    totals = [float(total) for _, _, total in named]
    assert len(named) == 3 and totals == sorted(totals)
    assert ("policies.model0.trainer.token_budget", "512") in [(path, value) for path, value, _ in named]
    for path, value, total in named:
        changed = load_recipe(tmp_path / "recipe.yaml", [f"{path}={value}", "inference.a.device=cpu"], {})
        assert host_estimates(changed, has_gpus=False)[0].total_bytes / GIB == pytest.approx(float(total), abs=0.06)


@pytest.mark.parametrize("memory", [4, 8, 16, 64])
def test_new_fits_the_memory_of_a_machine_without_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, memory: int
) -> None:
    monkeypatch.setattr("services.cli.new.gpus_here", list)
    for place in ("services.cli.new", "services.cli.check.memory"):
        monkeypatch.setattr(f"{place}.host_memory_bytes", lambda: memory * GIB)
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"problem": "{n}?", "answer": "{n}"}}\n' for n in range(200)))
    made = rollmill(
        "new", str(tmp_path / "mine"), "--model", small_model(tmp_path), "--data", str(tmp_path / "rows.jsonl")
    )
    assert made.exit_code == 0, made.output
    recipe = load_recipe(tmp_path / "mine", (), {})
    policy = recipe.policies["model0"]
    assert policy.trainer.token_budget == policy.model.context_length <= 1024 and policy.batch.size == 32
    assert recipe.sampling.max_new_tokens <= policy.model.context_length // 2
    total = host_estimates(recipe, has_gpus=False)[0].total_bytes
    assert total < memory * GIB or policy.model.context_length == 256, "the least that is written"


def test_too_few_open_files_for_the_slots_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = load_recipe(written(tmp_path), ["inference.a.engine=sglang", "inference.a.num_slots=8192"], {})
    for most, told in ((4096, True), (65536, False), (-1, False)):
        monkeypatch.setattr(launch.resource, "getrlimit", lambda which, most=most: (1024, most))
        lines = [line for line in launch_problems(recipe) if "ulimit -Hn" in line]
        assert bool(lines) is told
        assert all("inference.a.num_slots is 8192" in line and "at most 3584 slots" in line for line in lines)
    monkeypatch.setattr(launch.resource, "getrlimit", lambda which: (1024, 4096))
    embedded = load_recipe(written(tmp_path), ["inference.a.num_slots=8192"], {})
    assert "ulimit" not in str(launch_problems(embedded)), "requests to an engine within the service take no file"


# --- GPUs of the machine

REPOSITORY = Path(__file__).resolve().parents[3]


def on_gpus(*overrides: str) -> Recipe:
    """Inference on GPUs 0 to 3, the trainer on 4 to 7."""
    return load_recipe(REPOSITORY / "recipes/code/qwen3-8b-m2po-full", list(overrides), {})


def test_gpus_that_are_not_there_are_named_with_the_key_and_those_that_are() -> None:
    (line,) = gpu_problems(on_gpus(), [80.0] * 6)
    assert line.startswith("policies.model0.trainer.gpus names GPU 6, 7, but this machine has the GPUs 0 to 5")


def test_a_device_that_is_cuda_is_told_where_there_is_no_gpu() -> None:
    overrides = ["inference.a.device=cuda", "policies.model0.trainer.device=cuda"]
    quickstart = load_recipe(REPOSITORY / "recipes/quickstart", overrides, {})
    lines = gpu_problems(quickstart, [])
    assert [line.partition(" is ")[0] for line in lines] == ["inference.a.device", "policies.model0.trainer.device"]
    assert all("no NVIDIA GPU" in line and "write cpu or auto" in line for line in lines)
    assert gpu_problems(quickstart, [80.0]) == []


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


def test_an_interpreter_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.cli.check.recipe.gpus_here", lambda: [80.0] * 8)
    lines = launch._interpreter_problems(on_gpus("inference.a.sglang.python=/nowhere/bin/python"), has_gpus=False)
    assert "inference.a: sglang.python: there is no interpreter /nowhere/bin/python" in "\n".join(lines)


def test_an_environment_of_servers_that_cannot_be_used_is_told_with_the_target_that_makes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interpreters whose packages are files of a test: none, a torch that does not load, one for CPUs, one for CUDA."""
    engine = "vllm"
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
        lines = launch._interpreter_problems(on_gpus(f"inference.a.engine={engine}"), has_gpus=False)
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


# --- memory, estimated before any process starts

QWEN3_8B = ModelShape.by_name("Qwen/Qwen3-8B")


def test_an_engine_fills_its_share_and_needs_room_for_one_context() -> None:
    assert QWEN3_8B is not None
    service = InferenceConfig.model_validate({"engine": "sglang", "sglang": {"memory_share": 0.8}})
    parts = engine_parts(QWEN3_8B, service, 80 * GIB, 16_384)
    assert parts["weights"] + parts["KV cache"] == pytest.approx(0.8 * 80 * GIB)
    small = engine_parts(QWEN3_8B, service, 16 * GIB, 16_384)
    assert small["KV cache"] == 147_456 * 16_384


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("Qwen/Qwen3-8B", 8.19),
        ("Qwen/Qwen2.5-7B-Instruct", 7.62),
        ("meta-llama/Llama-3.1-70B-Instruct", 70.0),
        ("org/thing-1.5B-base", 1.5),
        ("org/large", 0.0),
        ("org/model-8Bit", 0.0),
        ("gpt2", 0.0),
    ],
)
def test_sizes_are_read_from_names_and_not_guessed_without(name: str, billions: float) -> None:
    shape = ModelShape.by_name(name)
    assert (0 if shape is None else shape.num_parameters / 1e9) == pytest.approx(billions, rel=0.01)


def test_a_local_config_is_counted(tmp_path: Path) -> None:
    config = {
        "hidden_size": 4096, "num_hidden_layers": 36, "intermediate_size": 12288, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "tie_word_embeddings": False,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    shape = ModelShape.of(str(tmp_path))
    assert shape is not None and QWEN3_8B is not None
    assert shape.num_parameters == pytest.approx(QWEN3_8B.num_parameters, rel=1e-3)  # norms are left out
    assert (shape.kv_width, shape.num_layers) == (QWEN3_8B.kv_width, QWEN3_8B.num_layers)


QWEN3_30B = {
    "hidden_size": 2048, "num_hidden_layers": 48, "intermediate_size": 6144, "num_attention_heads": 32,
    "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936, "num_experts": 128, "num_experts_per_tok": 8,
    "moe_intermediate_size": 768, "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip
MIXTRAL = {
    "hidden_size": 4096, "num_hidden_layers": 32, "intermediate_size": 14336, "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": 32000, "num_local_experts": 8, "num_experts_per_tok": 2,
}  # fmt: skip
QWEN15_MOE = {
    "hidden_size": 2048, "num_hidden_layers": 24, "intermediate_size": 5632, "num_attention_heads": 16,
    "num_key_value_heads": 16, "vocab_size": 151936, "num_experts": 60, "num_experts_per_tok": 4,
    "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632, "decoder_sparse_step": 1,
}  # fmt: skip
DEEPSEEK_MOE = {
    "hidden_size": 2048, "num_hidden_layers": 28, "intermediate_size": 10944, "num_attention_heads": 16,
    "num_key_value_heads": 16, "vocab_size": 102400, "n_routed_experts": 64, "num_experts_per_tok": 6,
    "moe_intermediate_size": 1408, "n_shared_experts": 2, "first_k_dense_replace": 1,
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "billions", "width"),
    [
        (QWEN3_30B, 30.53, 6144),
        ({**QWEN3_30B, "decoder_sparse_step": 2}, 30.53 - 24 * (0.6042 - 0.0377), 6144),
        ({**QWEN3_30B, "mlp_only_layers": [0, 1]}, 30.53 - 2 * (0.6042 - 0.0377), 6144),
        (MIXTRAL, 46.70, 2 * 14336),
        (QWEN15_MOE, 14.32, 4 * 1408 + 5632),
        (DEEPSEEK_MOE, 16.38, 8 * 1408),
    ],
    ids=["qwen3", "every second layer", "two dense layers", "mixtral", "qwen1.5", "deepseek"],
)
def test_the_experts_of_a_local_config_are_counted(
    tmp_path: Path, config: dict[str, object], billions: float, width: int
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    shape = ModelShape.of(str(tmp_path))
    assert shape is not None
    assert shape.num_parameters / 1e9 == pytest.approx(billions, rel=4e-3)
    assert shape.intermediate == width, "the experts that a token passes through"


# --- memory of the host

RECIPES = Path(__file__).resolve().parents[3] / "recipes"
VERSION = 2 * 8_190_735_360


def host_recipe(tmp_path: Path, model: str = "Qwen/Qwen3-8B", **sections: Any) -> Recipe:
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
    estimate = host_estimates(host_recipe(tmp_path), has_gpus=True)[0]
    assert estimate.shared == {"5 versions of model0": 5 * VERSION, "stage of a model0": VERSION}
    assert not [part for part in estimate.memory if part.startswith("mirror")], "mapped from the snapshot"
    by_vllm = host_estimates(host_recipe(tmp_path, inference={"engine": "vllm"}), has_gpus=True)[0]
    assert by_vllm.shared == estimate.shared
    full = host_estimates(host_recipe(tmp_path, weights={"transfer": "full", "keep_versions": 1}), has_gpus=True)[0]
    assert full.shared["3 versions of model0"] == 3 * VERSION
    delta = host_estimates(host_recipe(tmp_path, weights={"transfer": "delta"}), has_gpus=True)[0]
    assert delta.memory["mirror of a model0"] == VERSION


def test_shm_size_follows_from_the_recipe(tmp_path: Path) -> None:
    assert shared_memory_gib(host_recipe(tmp_path), 0) == 101  # 6 * 15.26 GiB and a tenth
    assert shared_memory_gib(host_recipe(tmp_path, model="Qwen/Qwen3-0.6B"), 0) < 10
    assert shared_memory_gib(host_recipe(tmp_path), 7) == 1, "a node without weights"


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
    problems = host_problems(host_recipe(tmp_path), has_gpus=True)
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
    assert [told in problem for problem in host_problems(host_recipe(tmp_path), has_gpus=False)] == [True]
    assert not any("tiny" in problem for problem in host_problems(host_recipe(tmp_path), has_gpus=True))


def test_a_spill_directory_is_a_choice_and_small_versions_may_spill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "host_memory_bytes", lambda: 2000 * GIB)
    monkeypatch.setattr(host, "shared_memory_here", lambda: 64 << 20)  # a container's default
    assert not host_problems(host_recipe(tmp_path, weights={"spill_directory": "/mnt/nvme"}), has_gpus=True)
    assert not host_problems(load_recipe(RECIPES / "quickstart" / "recipe.yaml", (), {}), has_gpus=False)


def test_the_cache_of_an_embedded_engine_is_refused_where_it_cannot_fit(tmp_path: Path) -> None:
    assert QWEN3_8B is not None
    service = InferenceConfig(engine="torch", dtype="bfloat16", num_slots=64)
    assert embedded_engine_parts(QWEN3_8B, service, 16_384)["KV cache"] == 8 * GIB
    enough = service.model_copy(update={"kv_cache_gib": 200.0})
    assert embedded_engine_parts(QWEN3_8B, enough, 16_384)["KV cache"] == 64 * 16_384 * 2 * 36 * 1024 * 2
    large = host_recipe(
        tmp_path, inference={"engine": "torch", "dtype": "bfloat16", "num_slots": 64, "kv_cache_gib": 200}
    )
    (line,) = misfits(large)
    assert "KV cache 144.0" in line and "launch.gpu_memory_gib: 80" in line
    assert all(key in line for key in ("inference.a.kv_cache_gib", "context_length", "inference.a.dtype"))
    with pytest.raises(ConfigError, match=r"KV cache 144\.0"):
        check_launch(large)
    bounded = host_recipe(
        tmp_path, inference={"engine": "torch", "dtype": "bfloat16", "num_slots": 64, "kv_cache_gib": 40}
    )
    assert not misfits(bounded)


def test_a_cache_that_holds_no_sequence_is_refused_with_the_least_that_does(tmp_path: Path) -> None:
    settings = {"engine": "torch", "dtype": "bfloat16", "num_slots": 64, "kv_cache_gib": 2.0}
    (line,) = small_caches(host_recipe(tmp_path, inference=settings))
    assert line.startswith("inference.a, policy model0: kv_cache_gib is 2, and one sequence of 16384 tokens needs 2.26")
    assert "raise kv_cache_gib to at least 2.26, or lower policies.*.model.context_length" in line
    with pytest.raises(ConfigError, match="one sequence of 16384 tokens"):
        check_launch(host_recipe(tmp_path, inference=settings))
    assert not small_caches(host_recipe(tmp_path, inference={**settings, "kv_cache_gib": 2.27}))
    assert not small_caches(host_recipe(tmp_path, inference={**settings, "engine": "sglang"}))
    assert not small_caches(host_recipe(tmp_path, model=None, inference=settings))


@pytest.mark.parametrize("model", ["somebody/unnamed", None])
def test_a_model_of_unknown_size_is_not_estimated(tmp_path: Path, model: str | None) -> None:
    unknown = host_recipe(tmp_path, model=model)  # type: ignore[arg-type]
    assert all(not found.shared for found in host_estimates(unknown, has_gpus=True).values())
    assert shared_memory_gib(unknown, 0) == 8


def test_what_cannot_fit_is_refused_with_its_parts_and_a_remedy(tmp_path: Path) -> None:
    host_recipe(tmp_path, trainer={"gpus": [0, 1], "num_ranks": 2})

    def found(*settings: str) -> list[str]:
        with_reference = ["policies.model0.algorithm.kl_coefficient=0.001", *settings]
        return misfits(load_recipe(tmp_path / "recipe.yaml", with_reference, {}))

    (line,) = found()
    for told in ("trainer-model0", "Adam 30.5", "launch.gpu_memory_gib: 80", "trainer.offload: [optimizer"):
        assert told in line
    assert found("launch.gpu_memory_gib=141") == found("policies.model0.trainer.master_dtype=bfloat16") == []
