"""The count of indefinite words: prose is read, code is not."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import words

REPOSITORY = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("text", "num_words", "found"),
    [
        ("Deletes the file.", 3, {}),
        ("What nobody needs.", 3, {"what": 1, "nobody": 1}),
        ("Deletes what `it` names, ``whoever`` asks.", 4, {"what": 1}),
        ("It's itself, its own.", 4, {}),
        ("", 0, {}),
    ],
)
def test_indefinite_words_are_counted_outside_of_code(text: str, num_words: int, found: dict[str, int]) -> None:
    assert words.counted([text]) == (num_words, found)


def test_docstrings_of_every_kind_are_read_and_other_strings_are_not() -> None:
    source = '"""A."""\nX = "what"\nclass B:\n    """B."""\n    key: int = 1\n    """C."""\n    def f(self):\n        """D."""\n'
    assert sorted(words.docstrings(source)) == ["A.", "B.", "C.", "D."]


def test_code_and_targets_of_links_are_no_prose() -> None:
    page = "See [it](what.md).\n\n```\nwhat who\n```\n\n<!-- nobody -->\n"
    assert words.counted([words.prose(page)]) == (2, {"it": 1})


@pytest.mark.slow
def test_the_last_line_has_the_shares_by_folder() -> None:
    done = subprocess.run(
        [sys.executable, "benchmarks/words.py", "--quick"],
        cwd=REPOSITORY,
        env={"PYTHONPATH": str(REPOSITORY), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    last = json.loads(done.stdout.splitlines()[-1])
    shares = last["docstrings"]["per_100"]
    assert {"services", "services/cli", "recipes", "benchmarks", "tests", "all"} <= set(shares)
    assert {folder: share for folder, share in shares.items() if share > 1.0} == {}
    assert last["docstrings"]["num_words"] > 10_000 and last["docs"]["per_100"]["docs"] >= 0
