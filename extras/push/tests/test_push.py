"""``rollmill push`` uploads an export and its card with the real huggingface_hub, to a hub on this machine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from extras.push.hub import card
from services.cli.__main__ import app
from services.common.config.loading import load_recipe, save_resolved
from services.orchestrator.metrics import RunMetrics
from tests.ports import free_port
from tests.unit.cli.hub_server import serving
from tests.unit.cli.test_checkpoints import write_checkpoint
from tests.unit.orchestrator.metrics_rows import STEP

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    directory = tmp_path / "run"
    directory.mkdir()
    save_resolved(load_recipe(ROOT / "recipes" / "quickstart", ["run.id=run0"]), directory)
    write_checkpoint(directory, "model0", 3)
    metrics = RunMetrics(directory, tensorboard=False)
    metrics.training_step("model0", 3, STEP)
    metrics.close()
    return directory


def push(run_dir: Path, url: str, *arguments: str, token: str = "hf_x") -> subprocess.CompletedProcess[str]:
    """In a process of its own: huggingface_hub reads its variables when it is imported."""
    environment = {
        "HF_ENDPOINT": url, "HF_TOKEN": token, "HF_HOME": str(run_dir.parent / "hf"), "PYTHONPATH": str(ROOT),
        "HF_HUB_DISABLE_PROGRESS_BARS": "1", "PATH": "/usr/bin:/bin", "HOME": str(run_dir.parent),
    }  # fmt: skip
    command = [sys.executable, "-m", "services.cli", "push", *(arguments or ("me/mine",)), str(run_dir)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.slow
def test_a_push_brings_the_export_and_its_card_in_one_commit(run_dir: Path) -> None:
    with serving() as hub:
        done = push(run_dir, hub.url)
        assert done.returncode == 0, done.stderr
    assert hub.repositories == {"me/mine": True}, "private, unless it is said otherwise"
    assert hub.messages == ["run0: model0 at training step 3"]
    assert {"README.md", "config.json", "model.safetensors", "rollmill_export.json"} <= set(hub.files)
    assert hub.files["model.safetensors"] == (run_dir / "export" / "model0-000003" / "model.safetensors").read_bytes()
    assert f"{hub.url}/me/mine/commit/" in done.stdout and "Bearer hf_x" in hub.tokens


@pytest.mark.slow
def test_a_hub_that_refuses_or_is_away_keeps_the_export(run_dir: Path) -> None:
    with serving() as hub:
        hub.refuse = 403
        refused = push(run_dir, hub.url)
    assert refused.returncode != 0 and "does not let this token write to me/mine" in refused.stderr.replace("\n", " ")
    away = push(run_dir, f"http://127.0.0.1:{free_port()}")
    assert away.returncode != 0 and "cannot be reached" in away.stderr and "Traceback" not in away.stderr
    assert (run_dir / "export" / "model0-000003" / "README.md").is_file()


@pytest.mark.parametrize("name", ["mine", "me/mine/yours", "me/..", "me/mi ne", "", "/"])
def test_a_name_that_is_none_is_refused_before_anything_is_exported(run_dir: Path, name: str) -> None:
    told = CliRunner().invoke(app, ["push", name, str(run_dir)])
    assert "OWNER/NAME" in str(told.exception)
    assert not (run_dir / "export").exists()


def test_the_card_names_base_and_data_of_the_hub_and_what_was_measured() -> None:
    recipe = load_recipe(
        ROOT / "recipes" / "quickstart", ["run.id=run0", "policies.model0.model.path=Qwen/Qwen3-0.6B", "warm_start={}"]
    )
    mean = {"value": 0.5, "low": 0.4, "high": 0.6}
    rows = [
        {"kind": "evaluation", "name": f"{name}/greedy", "versions": {"model0": version},
         "datasets": [{"name": "held_out", "mean_reward": mean, "num_items": 256}]}
        for name, version in (("start", 0), ("step-3", 3), ("end", 9))
    ]  # fmt: skip
    text = card(recipe, "model0", 9, rows)
    metadata = yaml.safe_load(text.split("---")[1])
    assert metadata["base_model"] == "Qwen/Qwen3-0.6B" and "rollmill" in metadata["tags"]
    assert [line for line in text.splitlines() if "held_out" in line] == [
        "| held_out, greedy | 0 | 0.500 (0.400 to 0.600) | 256 |",
        "| held_out, greedy | 9 | 0.500 (0.400 to 0.600) | 256 |",
    ]
