"""The command lines of vLLM servers."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import pytest

from extras.vllm.engine import CPU_CACHE_BYTES, server_commands
from services.common.errors import ConfigError
from services.inference.engine.served.process import ServerCommand
from tests.served_setup import setup_of

PYTHON = {"ROLLMILL_VLLM_PYTHON": sys.executable}
QWEN3_8B = {
    "vocab_size": 151936,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_size": 4096,
}


def commands(
    number: int = 1,
    gpus: tuple[str, ...] = (),
    on_cpu: bool = False,
    model_config: dict[str, Any] = QWEN3_8B,
    **settings: Any,
) -> list[ServerCommand]:
    return server_commands(setup_of("vllm", number, gpus, on_cpu, **settings), model_config, PYTHON)


def option(command: ServerCommand, name: str) -> str:
    return command.argv[command.argv.index(name) + 1]


def test_settings_of_the_recipe_become_arguments() -> None:
    (command,) = commands(num_slots=256, vllm={"memory_share": 0.7, "tensor_parallel": 2})
    assert command.argv[0] == sys.executable and command.argv[1].endswith("vllm/server/launch.py")
    assert option(command, "--model") == "Qwen/Qwen3-8B"
    assert option(command, "--gpu-memory-utilization") == "0.7"
    assert option(command, "--tensor-parallel-size") == "2"
    assert option(command, "--dtype") == "bfloat16"
    assert option(command, "--max-num-seqs") == "257", "and a request that checks the server"
    assert option(command, "--max-model-len") == "16384"
    assert option(command, "--host") == "127.0.0.1"
    assert option(command, "--logprobs-mode") == "processed_logprobs"
    assert option(command, "--max-logprobs") == "1024"
    assert json.loads(option(command, "--weight-transfer-config")) == {"backend": "rollmill_stage"}


def test_a_small_vocabulary_bounds_the_tokens_that_are_listed() -> None:
    (command,) = commands(model_config={"vocab_size": 300})
    assert option(command, "--max-logprobs") == "300"


def test_each_data_parallel_server_has_gpus_of_its_own() -> None:
    made = commands(number=2, gpus=("4", "5", "6", "7"), vllm={"tensor_parallel": 2})
    assert [command.env["CUDA_VISIBLE_DEVICES"] for command in made] == ["4,5", "6,7"]
    with pytest.raises(ConfigError, match="need 6, but have 4"):
        commands(number=3, gpus=("4", "5", "6", "7"), vllm={"tensor_parallel": 2})


def test_extra_arguments_are_passed_through_and_false_ones_are_negated() -> None:
    (command,) = commands(vllm={"extra_arguments": {"max-num-batched-tokens": 2048, "enable_prefix_caching": False}})
    assert option(command, "--max-num-batched-tokens") == "2048"
    assert "--no-enable-prefix-caching" in command.argv


@pytest.mark.parametrize("name", ["port", "--model", "logprobs-mode", "middleware"])
def test_arguments_that_the_engine_relies_on_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"vllm\.extra_arguments names"):
        commands(vllm={"extra_arguments": {name: 1}})


def test_logits_are_in_float32_on_a_gpu() -> None:
    """A server on a CPU computes in float32 anyway."""
    assert json.loads(option(commands()[0], "--hf-overrides")) == {"head_dtype": "float32"}
    assert "--hf-overrides" not in commands(on_cpu=True)[0].argv


def test_on_a_cpu_ranks_are_bound_to_cores_that_exist_and_the_cache_has_room_for_every_request() -> None:
    made = commands(number=3, on_cpu=True, vllm={"tensor_parallel": 2})
    cores = os.sched_getaffinity(0)
    for command in made:
        ranks = command.env["VLLM_CPU_OMP_THREADS_BIND"].split("|")
        assert len(ranks) == 2 and {int(core) for core in ranks} <= cores
        assert "--enforce-eager" in command.argv
    tiny = {**QWEN3_8B, "num_hidden_layers": 2, "num_key_value_heads": 1, "head_dim": 32}
    (command,) = commands(on_cpu=True, num_slots=3, model_config=tiny)
    assert int(option(command, "--kv-cache-memory-bytes")) >= 4 * 16384 * 2 * 2 * 32 * 2
    (command,) = commands(on_cpu=True, model_config={})
    assert int(option(command, "--kv-cache-memory-bytes")) == CPU_CACHE_BYTES
