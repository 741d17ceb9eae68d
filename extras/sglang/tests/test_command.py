"""The command lines of SGLang servers."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from extras.sglang.engine import server_commands
from services.common.config.processes import InferenceConfig
from services.common.errors import ConfigError
from services.common.installing import COMPLETE
from services.common.weights.snapshot import AdapterIdentity
from services.inference.engine.served.process import ServerCommand, interpreter, own_gpus
from tests.served_setup import setup_of

PYTHON = {"ROLLMILL_SGLANG_PYTHON": sys.executable}


def commands(
    number: int = 1,
    gpus: tuple[str, ...] = (),
    on_cpu: bool = False,
    adapter: AdapterIdentity | None = None,
    **settings: Any,
) -> list[ServerCommand]:
    return server_commands(setup_of("sglang", number, gpus, on_cpu, adapter, **settings), PYTHON)


def option(command: ServerCommand, name: str) -> str:
    return command.argv[command.argv.index(name) + 1]


def test_settings_of_the_recipe_become_arguments() -> None:
    (command,) = commands(num_slots=256, sglang={"memory_share": 0.7, "tensor_parallel": 2})
    assert command.argv[:3] == (sys.executable, "-m", "sglang.launch_server")
    assert option(command, "--model-path") == "Qwen/Qwen3-8B"
    assert option(command, "--mem-fraction-static") == "0.7"
    assert option(command, "--tp-size") == "2"
    assert option(command, "--dtype") == "bfloat16"
    assert option(command, "--max-running-requests") == "256"
    assert int(option(command, "--context-length")) >= 16384 + 2  # SGLang stops two tokens before its own
    assert option(command, "--host") == "127.0.0.1"
    assert "--skip-tokenizer-init" in command.argv and "--incremental-streaming-output" in command.argv


def test_a_server_of_an_adapter_gets_its_rank_and_targets_and_room_for_two_versions() -> None:
    adapter = AdapterIdentity(rank=16, alpha=32.0, targets=("k_proj", "q_proj"), base="xxh3-128:" + "0" * 32)
    (command,) = commands(on_cpu=True, adapter=adapter)
    assert "--enable-lora" in command.argv and option(command, "--lora-backend") == "torch_native"
    assert (option(command, "--max-lora-rank"), option(command, "--max-loras-per-batch")) == ("16", "3")
    assert command.argv[command.argv.index("--lora-target-modules") + 1 :] == ("k_proj", "q_proj")
    (command,) = commands(adapter=adapter)
    assert "--lora-backend" not in command.argv, "on a GPU SGLang has a better one"
    with pytest.raises(ConfigError, match="max-lora-rank, which Rollmill sets itself"):
        commands(sglang={"extra_arguments": {"max-lora-rank": 64}})


def test_each_data_parallel_server_has_gpus_of_its_own() -> None:
    made = commands(number=2, gpus=("4", "5", "6", "7"), sglang={"tensor_parallel": 2})
    assert [command.env["CUDA_VISIBLE_DEVICES"] for command in made] == ["4,5", "6,7"]
    assert [command.name for command in made] == ["sglang-a-model0-0", "sglang-a-model0-1"]
    with pytest.raises(ConfigError, match="need 6, but have 4"):
        commands(number=3, gpus=("4", "5", "6", "7"), sglang={"tensor_parallel": 2})


def test_extra_arguments_are_passed_through_and_win() -> None:
    extra = {"chunked-prefill-size": 2048, "enable_metrics": True, "disable_radix_cache": False, "dtype": "float16"}
    (command,) = commands(sglang={"extra_arguments": extra})
    assert option(command, "--chunked-prefill-size") == "2048"
    assert "--enable-metrics" in command.argv and "--disable-radix-cache" not in command.argv
    assert [word for word in command.argv if word == "--dtype"] == ["--dtype"] and option(
        command, "--dtype"
    ) == "float16"


@pytest.mark.parametrize("name", ["port", "--model-path", "skip-tokenizer-init"])
def test_arguments_that_the_engine_relies_on_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"sglang\.extra_arguments names"):
        commands(sglang={"extra_arguments": {name: 1}})


def test_on_a_cpu_ranks_are_bound_to_cores_that_exist() -> None:
    made = commands(number=3, on_cpu=True, sglang={"tensor_parallel": 2})
    cores = os.sched_getaffinity(0)
    for command in made:
        ranks = command.env["SGLANG_CPU_OMP_THREADS_BIND"].split("|")
        assert len(ranks) == 2 and {int(core) for core in ranks} <= cores
        assert command.argv[1].endswith("sglang/server/launch.py")
        assert option(command, "--attention-backend") == "torch_native"


def test_logits_are_in_float32_on_a_gpu_unless_the_recipe_says_otherwise() -> None:
    """A server on a CPU computes in float32 anyway."""
    assert "--enable-fp32-lm-head" in commands()[0].argv
    assert "--enable-fp32-lm-head" not in commands(on_cpu=True)[0].argv
    assert "--enable-fp32-lm-head" not in commands(sglang={"extra_arguments": {"enable_fp32_lm_head": False}})[0].argv


def test_a_kept_cache_runs_one_step_at_a_time() -> None:
    assert "--disable-overlap-schedule" in commands(kv_policy="keep")[0].argv
    assert "--disable-overlap-schedule" not in commands()[0].argv


def test_the_interpreter_is_the_setting_then_the_variable_and_must_be_there() -> None:
    assert interpreter("sglang", sys.executable, {"ROLLMILL_SGLANG_PYTHON": "/nowhere"}) == sys.executable
    assert interpreter("sglang", None, PYTHON) == sys.executable
    with pytest.raises(ConfigError, match="ROLLMILL_SGLANG_PYTHON: there is no interpreter /nowhere"):
        interpreter("sglang", None, {"ROLLMILL_SGLANG_PYTHON": "/nowhere"})


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_an_environment_beside_the_sources_is_taken_where_its_install_ended_and_for_its_device(
    engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.inference.engine.served.process.ROOT", tmp_path)
    for on_cpu, name in ((False, f".venv-{engine}"), (True, f".venv-{engine}-cpu")):
        python = tmp_path / name / "bin" / "python"
        python.parent.mkdir(parents=True)
        python.symlink_to(sys.executable)
        assert interpreter(engine, None, {}, on_cpu=on_cpu) == sys.executable, "the install has not ended"
        (tmp_path / name / COMPLETE).touch()
        assert interpreter(engine, None, {}, on_cpu=on_cpu) == str(python)


def test_a_services_gpus_are_its_own_or_what_it_is_shown() -> None:
    config = InferenceConfig.model_validate({"engine": "sglang"})
    assert own_gpus(config, {}) == []
    assert own_gpus(config, {"CUDA_VISIBLE_DEVICES": "2, 3"}) == ["2", "3"]
    named = InferenceConfig.model_validate({"engine": "sglang", "gpus": [1, 3]})
    assert own_gpus(named, {}) == ["1", "3"]
    assert own_gpus(named, {"CUDA_VISIBLE_DEVICES": "4,5,6,7"}) == ["5", "7"], "counted among those shown"
    assert own_gpus(named, {"CUDA_VISIBLE_DEVICES": "5,7"}) == ["5", "7"], "the launcher has mapped them"
    with pytest.raises(ConfigError, match="CUDA_VISIBLE_DEVICES=4,5,6 of this environment shows 3 GPUs"):
        own_gpus(named, {"CUDA_VISIBLE_DEVICES": "4,5,6"})
