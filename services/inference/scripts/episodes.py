"""Script of ``agent_env``: an expert's actions in the share of episodes that are right; the others fail soon.

The expert is the task's own list of actions (``expert``, ``walkthrough`` or ``actions``). Without one a shop is shopped
in by reading its pages: search for the instruction, look at the first hit, buy it; elsewhere any action that is listed
as available is as good as another.

An episode that goes wrong repeats one action, or ends by a reply without an action: task servers end such episodes early.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from services.inference.scripts.base import Cue
from services.inference.scripts.words import reasoning

_EXPERTS = ("expert", "walkthrough", "actions")
_INSTRUCTION = re.compile(r"Instruction:\s*+(?:\[SEP\]\s*+)?+((?:(?!Instruction:|\[SEP\]).)++)(?:\[SEP\]|\n)")
_PRODUCT = re.compile(r"\bB[0-9A-Z]{9}\b")
_LISTED = re.compile(r"AVAILABLE ACTIONS:\s*+(.+?)(?:<\||\Z)", re.DOTALL)
_IDLE = "look"


def act(cue: Cue) -> str:
    turn = len(cue.said)
    page = cue.prompt[max(0, cue.prompt.rfind("<|im_start|>user")) :]  # the environment's last message
    instructions = [found.strip() for found in _INSTRUCTION.findall(page)]
    if cue.is_right():
        expert = _expert(cue)
        if turn < len(expert):
            return _reply(cue, expert[turn], reasoning(cue))
        return _reply(
            cue, _shopping(page, instructions[-1]) if instructions else _any_listed(cue, page), reasoning(cue)
        )
    if not instructions:
        return _reply(cue, _IDLE, "nothing comes to mind. ")
    if turn == 0:
        return _reply(cue, f"search[{instructions[-1]}]", reasoning(cue))
    return "Nothing here is what I am looking for."


def _expert(cue: Cue) -> Sequence[str]:
    for name in _EXPERTS:
        found = cue.task.data.get(name)
        if isinstance(found, list | tuple):
            return [str(action) for action in found]
    return ()


def _shopping(page: str, instruction: str) -> str:
    """The next action of a direct purchase, from the text of the page."""
    shown = page[page.rfind("Instruction:") :]
    if "Buy Now" in shown:
        return "click[Buy Now]"
    product = _PRODUCT.search(shown)
    return f"click[{product.group()}]" if product else f"search[{instruction}]"


def _any_listed(cue: Cue, page: str) -> str:
    listed = _LISTED.findall(page)
    actions = [line.strip(" -,") for line in re.split(r"[\n,]", listed[-1])] if listed else []
    return cue.random(f"action/{len(cue.said)}").choice([action for action in actions if action] or [_IDLE])


def _reply(cue: Cue, action: str, thought: str) -> str:
    """The reply in AgentBench's form; the bare action if the prompt asks for no form."""
    if "ACTION:" in cue.prompt:
        return f"THOUGHT: {thought}ACTION: {action}"
    if "Action:" in cue.prompt:
        return f"Thought:\n{thought}\n\nAction:\n{action}"
    return action
