"""``agent_env``: an expert's actions in the share of episodes that are right, aimless ones in the others.

The expert is the task's own list of actions (``expert``, ``walkthrough`` or ``actions``). Without one a shop is shopped
in by reading its pages: search for the instruction, look at the first hit, buy it; elsewhere any action that is listed
as available is as good as another.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from services.inference.scripts.base import Cue
from services.inference.scripts.words import reasoning

_EXPERTS = ("expert", "walkthrough", "actions")
_INSTRUCTION = re.compile(r"Instruction:\s*(?:\[SEP\]\s*)?(.+?)\s*(?:\[SEP\]|\n)")
_PRODUCT = re.compile(r"\bB[0-9A-Z]{9}\b")
_LISTED = re.compile(r"AVAILABLE ACTIONS:\s*(.+?)(?:<\||\Z)", re.DOTALL)
_PASSIVE = ("help", "inventory", "look")  # cost a turn and change nothing


def act(cue: Cue) -> str:
    turn = len(cue.said)
    page = cue.prompt[cue.prompt.rfind("<|im_start|>user") :] if "<|im_start|>user" in cue.prompt else cue.prompt
    expert = _expert(cue)
    if cue.is_right():
        action = expert[turn] if turn < len(expert) else _shopping(page) or _any_listed(cue, page)
    else:
        action = _window_shopping(page) or _any_listed(cue, page)
    return _reply(cue, action)


def _expert(cue: Cue) -> Sequence[str]:
    for name in _EXPERTS:
        found = cue.task.data.get(name)
        if isinstance(found, list | tuple):
            return [str(action) for action in found]
    return ()


def _shopping(page: str) -> str | None:
    """The straight way to a purchase, from what the page shows; None where this is no shop."""
    instruction = _instruction(page)
    if instruction is None:
        return None
    if "Buy Now" in page:
        return "click[Buy Now]"
    product = _PRODUCT.search(page[page.rfind("Instruction:") :])
    return f"click[{product.group()}]" if product else f"search[{instruction}]"


def _window_shopping(page: str) -> str | None:
    """Something that never buys."""
    instruction = _instruction(page)
    if instruction is None:
        return None
    return "click[Back to Search]" if "Back to Search" in page else f"search[{instruction}]"


def _instruction(page: str) -> str | None:
    found = _INSTRUCTION.findall(page)
    return str(found[-1]) if found else None


def _any_listed(cue: Cue, page: str) -> str:
    listed = _LISTED.findall(page)
    actions = [line.strip(" -,") for line in re.split(r"[\n,]", listed[-1])] if listed else []
    useful = [action for action in actions if action] or list(_PASSIVE)
    return cue.random(f"action/{len(cue.said)}").choice(useful)


def _reply(cue: Cue, action: str) -> str:
    """As AgentBench's task servers read it; the bare action where the prompt asks for no form."""
    if "action:" not in cue.prompt.lower():
        return action
    heading = "ACTION:" if "ACTION:" in cue.prompt else "Action:"
    if heading == "ACTION:":
        return f"THOUGHT: {reasoning(cue)}ACTION: {action}"
    return f"Thought:\n{reasoning(cue)}\n\nAction:\n{action}"
