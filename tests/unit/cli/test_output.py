"""What a command prints, on terminals that lack signs, under other locales, and where it cannot be written."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from tests.waiting import WAIT_S

RECIPE = """
description: höchstens ≤ 1 🎉
extends: quickstart
data: {train: {path: ./ü ≤.jsonl}}
"""


def rollmill(shell: str, here: Path, variables: Mapping[str, str]) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        ["bash", "-c", f"set -o pipefail; {shell}", "shell", sys.executable, "-m", "services.cli"],
        cwd=here,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3]), **variables},
        capture_output=True,
        timeout=WAIT_S,
        check=False,
    )


def test_a_locale_without_utf_8_shows_a_recipe_with_any_signs(tmp_path: Path) -> None:
    variables = {"LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "ascii"}
    (tmp_path / "recipe.yaml").write_text(RECIPE, encoding="utf-8")
    (tmp_path / "ü ≤.jsonl").write_text('{"prompt": "ü", "answer": "≤"}\n' * 8, encoding="utf-8")
    shown = rollmill('"$@" check --show recipe.yaml --set name=ü', tmp_path, variables)
    assert shown.returncode == 0, shown.stdout + shown.stderr
    assert b"chstens" in shown.stdout and b"Traceback" not in shown.stderr


def test_a_command_whose_output_cannot_be_written_says_so_and_ends_quietly_when_its_reader_leaves(
    tmp_path: Path,
) -> None:
    full = rollmill('"$@" --help >/dev/full', tmp_path, {})
    assert full.returncode == 1
    assert full.stderr.decode().splitlines() == ["error: cannot write: [Errno 28] No space left on device"]
    left = rollmill('"$@" --help | true', tmp_path, {})
    assert left.stderr == b""
    assert rollmill('"$@" --help >&- 2>&-', tmp_path, {}).returncode == 0


def test_a_current_directory_that_was_deleted_is_told(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    ended = rollmill(f'cd {gone} && rmdir {gone} && "$@" status; code=$?; mkdir {gone}; exit $code', tmp_path, {})
    assert ended.returncode == 1 and b"the current directory has been deleted" in ended.stderr, ended.stderr


def test_a_home_in_an_argument_is_that_of_the_user_also_where_the_shell_leaves_it(tmp_path: Path) -> None:
    for words in ("status '~/lost'", "new mine --model='~/lost'"):
        ended = rollmill(f'"$@" {words}', tmp_path, {"HOME": str(tmp_path / "home")})
        assert b"Traceback" not in ended.stderr
        assert ended.returncode == 2 and str(tmp_path / "home" / "lost") in " ".join(
            ended.stderr.decode().split()
        ).replace("- ", "-"), ended.stderr
