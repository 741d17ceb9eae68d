"""The form in which text worlds and policies talk: a list of actions ends each message, ``ACTION:`` begins an answer."""

from __future__ import annotations

import re
from collections.abc import Sequence

from services.envgateway.envs.base import MOST_COMMAND_CHARS

ACTIONS_LEAD = " AVAILABLE ACTIONS: "
MALFORMED = """\
Error: there is no action in your reply. Write

THOUGHT: what you think (may be left out)
ACTION: your next action

with one of the available actions.
"""

_ACTION = re.compile(r"ACTION:(.*)")


def read_action(reply: str) -> str | None:
    """The text after the first ``ACTION:`` on its line, lower-cased; None when empty or too long for an action."""
    found = _ACTION.search(reply)
    command = found[1].strip() if found else ""
    return command.lower() if 0 < len(command) <= MOST_COMMAND_CHARS else None


def offer(admissible: Sequence[str]) -> str:
    """The list that ends every message to the policy; empty where a world lists no actions."""
    return ACTIONS_LEAD + "\n".join(admissible) + "\n" if admissible else ""
