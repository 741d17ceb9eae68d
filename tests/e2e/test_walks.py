"""The budget of the four walks: the files and functions that a reader opens to follow one action through the system.

Who needs more says so in the diff of this table. A budget is the number on a quiet machine plus 5%, and that of publish_swap
plus 20%: beside other tests an evaluation or a row of metrics runs in its windows.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
BUDGETS = {  # files, functions
    "task_dispatch": (17, 68),
    "engine_journal": (18, 91),
    "pull_gradient": (30, 176),
    "publish_swap": (43, 206),
}


@pytest.mark.slow
def test_each_walk_keeps_its_budget() -> None:
    command = [sys.executable, "benchmarks/walks.py", "--quick"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr
    counted = json.loads(done.stdout.splitlines()[-1])
    walked = {name: (counted[name], counted["functions"][name]) for name in BUDGETS}
    over = {name: (walked[name], most) for name, most in BUDGETS.items() if any(map(int.__gt__, walked[name], most))}
    assert over == {}, (
        "python benchmarks/walks.py --files lists them: straighten the walk, or raise its budget and say why"
    )
