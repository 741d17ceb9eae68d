"""A seeded stream of malformed, huge and misplaced actions, as any policy may write.

No action here earns a reward in any world: a reward for one of these is a fault of the world. Shared by the
benchmark ``worlds_hostile`` and its tests.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator

KIB, MIB = 1 << 10, 1 << 20
_SIZES = ((0.90, 64, 2 * KIB), (0.08, 2 * KIB, 128 * KIB), (0.018, 128 * KIB, MIB), (0.002, MIB, 10 * MIB))

_CONTROL = ["<|im_end|>", "<|im_start|>assistant\n", "</s>", "<think>", "</tool_call>", "<|endoftext|>", "[INST]"]
_FORMATS = ["%s%n%x%p", "{0.__class__.__mro__}", "${jndi:ldap://x}", "%(a)s", "{}" * 40, "\\u0000", "$(id)", "`id`"]
_ODD = ["\0", "a\0b", "\ud800", "\udfff" * 30, "\r", "\u2028", "\x1b[2J", "\x85", "\ufeff", "\u202e", "\x7f", "\b" * 9]
_ALIKE = ["ｂｕｙ ｎｏｗ", "ＡＣＴＩＯＮ: look", "lооk", "İstanbul", "ﬁre", "e\u0301" * 40, "ℌello", "ß" * 9]
_COMMANDS = [
    "save", "restore", "restart", "quit", "y", "script", "unscript", "undo", "verify", "\\x", "\\h", "\\d", "\\",
    "tw-trace-actions", "tw-extra-infos all", "restrict commands", "purloin all", "abstract coin to box", "gonear box",
    "look. save. script", "look\\x", "xyzzy", "plugh", "say *** the end ***", "<score>9</score>", "oops", "again", "g",
    "z. z. z. z", "goto 99", "superbrief", "notify off",
]  # fmt: skip
_PATHS = [
    "../../../../etc/passwd", "file:///etc/passwd", "http://127.0.0.1:3000/done/0/X/{}", "B0NOTTHERE", "item_page", "",
    "//", "C:\\", "/proc/self/environ", "b00000000a?x=1#y", "%2e%2e%2f", "done", "9" * 400, "back to search ", "< next",
]  # fmt: skip
_ENVELOPES = [
    '{"status": "completed", "result": {"reward": 1.0}}', '{"done": true, "reward": 1.0}', '"content"',
    '{"session_id": 0, "agent_response": {"status": "completed"}}', '{"output": {"status": "completed", "result": 1}}',
    "Final Answer: 1", "Operation: done", "Action: Answer", "Observation: you won", "reward: 1.0",
]  # fmt: skip
_VALUES = [
    "NaN", "Infinity", "-Infinity", "1e999", "9" * 5000, "null", "[]", "{}", "[[]]", '"\\ud800"', "true", "-0",
    '{"a":' * 900 + "1" + "}" * 900, "[" * 5000, "{" * 5000, '"' + "\\" * 99, '{"a": 1, "a": 2}', "1" + "0" * 400,
]  # fmt: skip
_TOOLS = ["python", "jupyter_code", "no_such_tool", "", "\ud800", "__import__", "../python"]


def actions(seed: int) -> Iterator[str]:
    """Without end; the same seed gives the same actions. Every kind comes about equally often."""
    draw = random.Random(seed)
    kinds: list[Callable[[random.Random], str]] = [
        _odd, _long, _bomb, _command, _shopping, _envelope, _tool_call, _json, _prefixed, lambda _: "",
    ]  # fmt: skip
    last = ""
    while True:
        if draw.random() < 0.15:
            yield last  # the same once more
            continue
        last = draw.choice(kinds)(draw)
        yield last


def _size(draw: random.Random) -> int:
    (_, least, most), *_ = draw.choices(_SIZES, [share for share, _, _ in _SIZES])
    return draw.randint(least, most)


def _odd(draw: random.Random) -> str:
    pieces = draw.choices([*_ODD, *_ALIKE, *_CONTROL, *_FORMATS], k=draw.randint(1, 12))
    return draw.choice(["", " ", "\n"]).join(pieces)


def _long(draw: random.Random) -> str:
    piece = draw.choice(["a", "go to ", "the ", " ", "\n", "é", "look. ", "]", "9", "\t", "a b c d ", "😀"])
    text = piece * (_size(draw) // len(piece) + 1)
    return draw.choice(["", "ACTION: ", "Action: search[", "search[", "action:"]) + text + draw.choice(["", "]", "\n"])


def _bomb(draw: random.Random) -> str:
    """A text on which a backtracking expression backtracks often."""
    piece = draw.choice(
        ["Action: search[", "[", "a[", "Action:  ", "action:", "ACTION:", "<tool_call>", "Action:\n", "]"]
    )
    lead = draw.choice(["", "Action:", "search[", "Action: click["])
    return lead + piece * (_size(draw) // len(piece) + 1) + draw.choice(["", "]", "x"])


def _command(draw: random.Random) -> str:
    said = draw.choice(_COMMANDS)
    return draw.choice(["ACTION: ", "THOUGHT: hm\nACTION:", "ACTION: look\nACTION: ", ""]) + said


def _shopping(draw: random.Random) -> str:
    verb = draw.choice(["click", "search", "buy", "CLICK", "click[search", "click "])
    return (
        draw.choice(["Action: ", "Action:\n\n", "action:", ""]) + f"{verb}[{draw.choice([*_PATHS, *_ODD, *_FORMATS])}]"
    )


def _envelope(draw: random.Random) -> str:
    return draw.choice(["", "ACTION: ", "Action:\n"]) + draw.choice([*_ENVELOPES, *_CONTROL])


def _tool_call(draw: random.Random) -> str:
    name, value = draw.choice(_TOOLS), draw.choice(_VALUES)
    code = draw.choice(["\ud800", "\0", "import os; os._exit(0)", "x" * 2000, "raise SystemExit", "(" * 400, ""])
    inner = draw.choice(
        [
            json.dumps({"name": name, "arguments": {"code": code}}),
            f'{{"name": "python", "arguments": {value}}}',
            f'{{"name": "python", "arguments": {{"code": {value}}}}}',
            f'{{"name": {value}, "arguments": {{}}}}',
            json.dumps({"name": name, "arguments": {"code": "1", "\ud800" * 99: 1}}),
            value,
        ]
    )
    return f"<tool_call>{inner}" + draw.choice(["</tool_call>", "", "</tool_call></tool_call>"])


def _json(draw: random.Random) -> str:
    return draw.choice(["", "ACTION: ", "Action: search", "\\boxed{"]) + draw.choice(_VALUES)


def _prefixed(draw: random.Random) -> str:
    return draw.choice(["ACTION:", "Action:", "THOUGHT:", "[SEARCH]", "<answer>", "\\boxed{"]) * draw.randint(1, 9)


def bodies(num: int, seed: int) -> Iterator[tuple[str, bytes]]:
    """Paths of a task server, with bodies that are no request, or a request out of its turn."""
    draw = random.Random(seed)
    paths = [
        "episode/start", "episode/step", "episode/cancel", "household_toy/episode/step", "no such/episode/start",
        "%ff/episode/start", "interact",
    ]  # fmt: skip
    for _ in range(num):
        value = draw.choice(_VALUES)
        body = draw.choice(
            [
                '{"sample_id": 1}',
                f'{{"sample_id": {value}, "config": {value}}}',
                f'{{"episode_id": {value}, "action": {{"type": "text", "content": "look"}}}}',
                f'{{"episode_id": "x", "action": {value}}}',
                value,
                "\0",
                "x" * _size(draw),
                "\xff\xfe",
            ]
        )
        yield draw.choice(paths), body.encode("latin-1", errors="replace")
