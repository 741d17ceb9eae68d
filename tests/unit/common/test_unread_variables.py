"""Variables that no process reads although they look like ours are named; all others are left alone."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from services.common.config.loading import load_recipe
from services.common.config.reading.unread import unread_variables

ROOT = Path(__file__).resolve().parents[3]
TWO_SERVICES = load_recipe(ROOT / "recipes/code-multi-agent/qwen3-8b-codegen-verifier-m2po-full-2node")


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("INFERENCE_A_GPU", "INFERENCE_A_GPUS"),
        ("INFERENC_A_GPUS", "INFERENCE_A_GPUS"),
        ("inference_a_gpus", "INFERENCE_A_GPUS"),
        ("RAAS_B_GPUS", "INFERENCE_B_GPUS"),
        ("ASTRAFLOW_PORT", "ORCHESTRATOR_PORT"),
        ("ASTRAFLOW_HOST_EXTERNAL", "ORCHESTRATOR_HOST_EXTERNAL"),
        ("ENV_GATEWAY_PORT", "ENVGATEWAY_PORT"),
        ("WEIGHT_PORT_MODEL0", "WEIGHTS_PORT_MODEL0"),
        ("TRAINER_MODEL_1_GPUS", "TRAINER_MODEL1_GPUS"),
        ("TRAINER0_GPUS", "TRAINER_GPUS"),
        ("ROLLMILL_DATAROOT", "ROLLMILL_DATA_ROOT"),
        ("MAX_WORKER", "MAX_WORKERS"),
        ("NODE_HOSTS", "NODE_HOST"),
        ("ALLOW_TIER0", "ALLOW_TIER_0"),
        ("ALLOW_TIER_O", "ALLOW_TIER_0"),
        ("MAX_MEM", "MAX_MEMORY"),
        ("MAX_MEMORY_MB", "MAX_MEMORY"),
        ("MAX_EXEC_TIME", "MAX_EXECUTION_TIME"),
        ("WEIGHTS_PORT", "WEIGHTS_PORT_MODEL[01]"),
    ],
)
def test_a_name_near_one_that_is_read_is_told_with_it(name: str, meant: str) -> None:
    (sentence,) = unread_variables(TWO_SERVICES, {name: "secret"})
    assert name in sentence and re.search(rf"did you mean {meant}\?", sentence) and "secret" not in sentence


@pytest.mark.parametrize("name", ["INFERENCE_A_GPUS", "TRAINER_MODEL1_GPUS", "TRAINER_GPUS", "WEIGHTS_PORT_MODEL1", "NODE_HOST",
    "RUN_DIR", "CUDA_VISIBLE_DEVICES", "SLURM_JOB_GPUS", "REDIS_PORT", "REDIS_PASSWORD", "NODE_NAME", "MASTER_PORT", "MAX_JOBS",
    "HOSTNAME", "PATH", "HF_HOME", "http_proxy"])  # fmt: skip
def test_what_is_read_and_what_belongs_to_others_is_left_alone(name: str) -> None:
    assert unread_variables(TWO_SERVICES, {name: "1"}) == []


@pytest.mark.parametrize("name", ["MAX_QUEUE_WAIT_TIME", "LONG_BATCH_MAX_QUEUE_WAIT_TIME", "MAX_LONG_BATCH_CHUNK_SIZE",
    "REDIS_RESULT_EXPIRE", "REDIS_WORKER_REGISTER_TIMEOUT", "REDIS_SOCKET_TIMEOUT", "PYTHON_EXECUTE_COMMAND", "CPP_COMPILER_PATH",
    "WORK_QUEUE_NAME", "ERROR_CASE_SAVE_PATH", "MAX_STDOUT_ERROR_LENGTH"])  # fmt: skip
def test_settings_of_code_judge_without_effect_are_named(name: str) -> None:
    (sentence,) = unread_variables(None, {name: "1", "MAX_MEMORY": "1", "RUN_WORKERS": "1", "INFERENCE_X_GPU": "0"})
    assert f"{name} of Code Judge has no effect" in sentence


def test_every_variable_of_the_sources_and_of_the_scripts_headers_is_known() -> None:
    sources = [*ROOT.glob("services/**/*.py"), *ROOT.glob("tests/*.py")]
    named = {name for path in sources for name in re.findall(r"environ\W+(?:get\W+)?(ROLLMILL_\w+)", path.read_text())}
    for script in [*ROOT.glob("deploy/launch/*.sh"), ROOT / "recipes/run.sh"]:
        header = "".join(line for line in script.read_text().splitlines() if line.startswith("#"))
        named |= set(re.findall(r"\b[A-Z]+(?:_[A-Z0-9]+)+\b", header))
    assert unread_variables(TWO_SERVICES, dict.fromkeys(named, "1")) == [] and len(named) > 25
