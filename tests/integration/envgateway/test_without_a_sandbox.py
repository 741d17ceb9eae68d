"""A gateway where code cannot be isolated: it serves a recipe that runs no program, and refuses programs with the remedy."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from services.common.config.envgateway import EnvGatewayConfig, ScorerConfig
from services.common.errors import SandboxRefusedError
from services.common.pb import environment_pb2 as pb
from services.common.rpc.client import channel, translated_errors
from services.common.telemetry.logs import LogEvent
from services.envgateway.app import Gateway
from services.envgateway.sandbox.pool import SandboxPool
from services.inference.gateway import judge_request
from services.inference.workflows.base import JudgeCase
from tests.integration.envgateway.conftest import CONFIG
from tests.integration.envgateway.test_gateway import Clients
from tests.ports import free_port
from tests.waiting import PROCESS_S, WAIT_S, until

ROOT = Path(__file__).resolve().parents[3]
# As root there is tier 2 or 1 wherever its users are mapped, so root of a namespace with one user stands for a plain one.
BARRED = [sys.executable, str(ROOT / "tests" / "no_namespaces.py"), *(["--one-user"] if os.getuid() == 0 else [])]
ISOLATED = CONFIG.model_copy(update={"allow_tier_0": False})


def test_only_a_pool_that_is_optional_begins_without_isolation() -> None:
    with pytest.raises(SandboxRefusedError, match="cannot be isolated"):
        SandboxPool.start_before_threads(ISOLATED, ())


async def test_programs_are_refused_with_the_remedy_and_all_else_is_served() -> None:
    config = EnvGatewayConfig(port=0, sandbox=ISOLATED, math=ScorerConfig(num_workers=1))
    gateway = Gateway(config, SandboxPool.start_before_threads(ISOLATED, (), is_optional=True))
    async with channel(f"127.0.0.1:{await gateway.start()}") as connection:
        clients = Clients(connection)
        refused = pytest.raises(SandboxRefusedError, match=r"runs no programs.*envgateway\.sandbox\.allow_tier_0: true")
        with refused, translated_errors("gateway"):
            await clients.code.ExecuteCode(pb.ExecuteCodeRequest(code="print(1)"), timeout=WAIT_S)
        with refused, translated_errors("gateway"):
            request = judge_request(
                "print(1)", [JudgeCase(given="", expected="1")], entry_point="", case_time_s=1.0, request_id=""
            )
            await clients.judge.Judge(request, timeout=WAIT_S)
        row = {"tests": {"kind": "stdin", "cases": [{"stdin": "", "expected": "1"}]}}
        graded = pb.ComputeRewardRequest(
            reward="code", task_json=json.dumps(row).encode(), completion="```python\nprint(1)\n```"
        )
        with refused, translated_errors("gateway"):
            await clients.rewards.ComputeReward(graded, timeout=WAIT_S)
        scored = await clients.rewards.ComputeReward(
            pb.ComputeRewardRequest(reward="math", task_json=b'{"answer": "4"}', completion="\\boxed{4}"),
            timeout=WAIT_S,
        )
        assert scored.outcome == pb.REWARD_OUTCOME_CORRECT
        episode = await clients.create("household_toy", {"index": 0})
        assert (await clients.step(episode.episode_id, 1, "look")).observation
    await gateway.stop()


@pytest.mark.needs("Linux")
async def test_the_gateway_of_a_recipe_without_programs_starts_where_nothing_can_be_isolated(
    tmp_path: Path,
) -> None:
    log = tmp_path / "log"
    gateway = _gateway("guess", log, f"envgateway.port={free_port()}")
    try:
        await until(lambda: LogEvent.SERVER_READY in log.read_text(), "the gateway serves", timeout_s=PROCESS_S)
        assert "sandbox.absent" in log.read_text() and "Traceback" not in log.read_text()
    finally:
        gateway.terminate()
        assert gateway.wait(PROCESS_S) == 0


@pytest.mark.needs("Linux")
@pytest.mark.parametrize(("recipe", "settings"), [("quickstart-code", ()), ("guess", ("envgateway.http.port=0",))])
def test_the_gateway_of_a_recipe_with_programs_ends_with_the_remedy(
    recipe: str, settings: tuple[str, ...], tmp_path: Path
) -> None:
    log = tmp_path / "log"
    assert _gateway(recipe, log, f"envgateway.port={free_port()}", *settings).wait(PROCESS_S) == 1
    assert "cannot be isolated" in log.read_text() and "allow_tier_0: true" in log.read_text()
    assert "Traceback" not in log.read_text()


@pytest.mark.needs("Linux")
@pytest.mark.parametrize("command", ["check", "run"])
def test_a_recipe_with_programs_is_refused_before_anything_starts(command: str, tmp_path: Path) -> None:
    runs = ["--set", f"run.dir={tmp_path / 'runs'}"]
    done = subprocess.run(
        [*BARRED, sys.executable, "-m", "services.cli", command, "recipes/quickstart-code", *runs],
        cwd=ROOT, capture_output=True, text=True, check=False, timeout=PROCESS_S, env={**os.environ, "COLUMNS": "1000"},
    )  # fmt: skip
    told = done.stdout + done.stderr
    assert (done.returncode != 0) == (command == "run"), "check tells what is missing here"
    assert "workflow.settings.reward: code: code cannot be isolated" in told and "allow_tier_0: true" in told
    assert not (tmp_path / "runs").exists()


def _gateway(recipe: str, log: Path, *settings: str) -> subprocess.Popen[bytes]:
    changed = [part for setting in settings for part in ("--set", setting)]
    with log.open("wb") as out:
        return subprocess.Popen(
            [*BARRED, sys.executable, "-m", "services.envgateway", "--recipe", f"recipes/{recipe}", *changed],
            cwd=ROOT, stdin=subprocess.DEVNULL, stdout=out, stderr=out,
        )  # fmt: skip
