"""``rollmill run`` trains to its end whatever its parent left it: proxies, another job's ranks, encodings, closed output."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.e2e.conftest import REPOSITORY, RUN_TIMEOUT_S
from tests.e2e.test_first_run import SHORT, read

pytestmark = pytest.mark.slow
PROXIES = dict.fromkeys(
    ("http_proxy", "https_proxy", "all_proxy", "grpc_proxy", "HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:9"
)
JOB = {"WORLD_SIZE": "8", "RANK": "3", "LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "8", "MASTER_ADDR": "10.0.0.9", "MASTER_PORT": "1",
       "TORCHELASTIC_RUN_ID": "x", "PET_NNODES": "3", "PET_NODE_RANK": "1", "SLURM_PROCID": "3",
       "GLOO_SOCKET_IFNAME": "absent0", "NCCL_SOCKET_IFNAME": "absent0"}  # fmt: skip
ASCII = {"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "LC_ALL": "C"}

REWARDS = """
import asyncio, itertools

calls = itertools.count()


def leaves(task, completion):
    number = next(calls)
    return leaves_later(number) if number % 2 else left(number)


async def leaves_later(number):
    return left(number)


def left(number):
    if number % 4 > 1:
        raise [asyncio.CancelledError, SystemExit, KeyboardInterrupt][number // 4 % 3](0)
    print("reward \\u2264 1 \\U0001f389")
    return float(number // 4 % 2)
"""


def test_a_run_trains_to_its_end_and_a_reward_that_leaves_or_cancels_fails_its_rollouts_by_name(tmp_path: Path) -> None:
    """Proxies, two ranks in another job, ignored signals, ASCII, a closed input, a full output. Without a run:
    tests/unit/common/test_process.py."""
    read(tmp_path, "new", "mine")
    (tmp_path / "mine" / "wild.py").write_text(REWARDS)
    settings = ("policies.model0.trainer.num_ranks=2", "description=reward ≤ 1 🎉", "run.dir=./ü ≤",
                "workflow.settings.reward=wild:leaves")  # fmt: skip
    sets = [part for each in settings for part in ("--set", each)]
    shell = "trap '' CHLD HUP PIPE; exec \"$@\" <&- >/dev/full"
    done = subprocess.run(
        ["bash", "-c", shell, "shell", sys.executable, "-m", "services.cli", "run", "mine", *SHORT, *sets],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", **PROXIES, **JOB, **ASCII},
        stderr=subprocess.PIPE,
        timeout=RUN_TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode(errors="replace")
    (run_dir,) = tmp_path.glob("*/mine-*")
    assert json.loads((run_dir / "summary.json").read_text())["state"] == "finished"
    events = [json.loads(line) for line in (run_dir / "logs" / "inference-a.jsonl").read_text().splitlines()]
    failed = Counter(event["reason"] for event in events if event["event"] == "rollout.failed")
    assert {"CancelledError", "SystemExit", "KeyboardInterrupt"} <= failed.keys()
