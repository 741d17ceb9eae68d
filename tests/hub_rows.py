"""A few rows of every dataset on the hub, made here in the true form of its columns, with the right answers.

``tests/data/hub/NAME.jsonl`` holds the rows of ``KNOWN[NAME]``; the columns are those that its card or the loaders of
public trainers show. ``RIGHT`` has a completion that solves each task that is made of them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROWS = Path(__file__).parent / "data" / "hub"

COLUMNS = {
    "aime24": "id problem solution answer url year",
    "aime25": "problem answer id",
    "amc23": "id question answer url",
    "amc24": "exam problem_number problem answer",
    "dapo-filter": "data_source prompt ability reward_model extra_info",
    "dapo-math-17k": "prompt solution data_source source_prompt ability reward_model extra_info",
    "deepcoder-codeforces": "problem tests",
    "deepcoder-primeintellect": "problem solutions tests",
    "deepscaler": "problem answer solution",
    "gsm8k": "question answer",
    "humaneval": "task_id prompt canonical_solution test entry_point",
    "livecodebench-v5": "question input_output query_id task starter_code solutions language",
    "math500": "problem solution answer subject level unique_id",
    "minerva-math": "question answer",
}

RIGHT = {
    "aime24": [r"\boxed{24}"],
    "aime25": [r"\boxed{28}"],
    "amc23": [r"\boxed{75}"],
    "amc24": [r"\boxed{400}", r"\boxed{\pi/4}"],
    "dapo-filter": [r"\boxed{9}", r"\boxed{2}"],
    "dapo-math-17k": [r"\boxed{97}", r"\boxed{210}"],
    "deepcoder-codeforces": [
        "for _ in range(int(input())):\n    print(int(input()) ** 2)",
        "print(max(input().split(), key=len))",
    ],
    "deepcoder-primeintellect": [
        "a, b = map(int, input().split())\nprint(a + b)",
        "def shout(word):\n    return word.upper() + '!'",
        "class Solution:\n    def ends(self, numbers):\n        return [min(numbers), max(numbers)]",
        "def half(number):\n    return number // 2",
    ],
    "deepscaler": [r"\boxed{16}", r"\boxed{\frac{3}{8}}"],
    "gsm8k": [r"\boxed{51}", r"\boxed{2500}"],
    "humaneval": ["def vowels(text):\n    return sum(letter in 'aeiou' for letter in text)"],
    "livecodebench-v5": [
        "import sys\nprint(len(sys.stdin.readlines()))",
        "class Solution:\n    def total(self, numbers: List[int]) -> int:\n        return sum(numbers)",
        "def repeated(word, times):\n    return word * times",
    ],
    "math500": [r"\boxed{10}", r"\boxed{(2, \pi/2)}"],
    "minerva-math": [
        r"\boxed{3.8e27}",
        r"\boxed{2x}",
    ],  # in the notation of the row: Math-Verify equates no other with it
}


def rows_of(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (ROWS / f"{name}.jsonl").read_text().splitlines()]
