"""Prompts for TextWorld's games, and the clean-up of the games' own text."""

from __future__ import annotations

import re
from collections.abc import Sequence

from services.envgateway.envs.replies import offer

INSTRUCTION = """\
You are playing a text game. You are told where you are and what you are after; after each of your actions you are told \
what happened. Each reply is one of these two:

THOUGHT: what you think
ACTION: what you do

or only

ACTION: what you do

One action per reply, a short command such as one of the available actions.

"""

_BANNER = re.compile(r"[\s_|\\/$<>]+")
_STATUS_LINE = re.compile(r"^>\s.*$", re.MULTILINE)  # the prompt, and the status line beside the prompt


def opening(feedback: str, objective: str, admissible: Sequence[str]) -> str:
    """The first message. Games tell their objective themselves, or the file beside them does."""
    scene = tidy(feedback)
    told = objective if objective and objective not in scene else ""
    return INSTRUCTION + "\n".join(filter(None, (told, scene))) + offer(admissible)


def tidy(feedback: str) -> str:
    """The text without the title's drawing, the prompt and empty lines at either end or in a row."""
    lines = [
        line.rstrip()
        for line in _STATUS_LINE.sub("", feedback).splitlines()
        if not (line.strip() and _BANNER.fullmatch(line))
    ]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip()
