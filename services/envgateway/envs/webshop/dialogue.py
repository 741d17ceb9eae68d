"""Converts a visit to messages for the policy, and a reply to an action.

``agentbench`` talks as AgentBench's web shopping does: rules and an example first, then an observation and the
available actions each turn; the reply has "Action:" and the action; a reply without one ends the episode. ``bare``
shows the page alone and takes the whole reply as the action.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal

from services.common.config.processes.environments import WebshopPage
from services.envgateway.envs.webshop.visit import Visit

Style = Literal["agentbench", "bare"]

# No part of the pattern backtracks: a reply of many spaces or of many beginnings is read once.
_BEGINNING = re.compile(r"[Aa]ction: *+\n*+ *+((?:search|click)\[)")

RULES = """\
You are shopping on a website. An instruction tells you what to buy.
Each turn shows you the page as an observation, and the actions that are available. Answer with one action:
search[keywords]
click[value]
Search only where there is a search bar, with keywords that you choose well. The value of a click is one of the clickables.
An action that is not available changes nothing. You are done when you have bought something: click[Buy Now].
Answer in this form:

Thought:
I think ...

Action:
click[something]"""

_INSTRUCTION = "Instruction: [SEP] i want a blue steel water bottle, 20 ounce, and price lower than 30.00 dollars [SEP]"
_ITEM = (
    f"{_INSTRUCTION} Back to Search [SEP] < Prev [SEP] color [SEP] black [SEP] blue [SEP] Example Steel Water Bottle, "
    "20 Ounce [SEP] Price: $18.5 [SEP] Rating: N.A. [SEP] Description [SEP] Features [SEP] Reviews [SEP] Buy Now"
)
_ITEM_CLICKS = ["back to search", "< prev", "description", "features", "reviews", "buy now", "black", "blue"]


def _turn(observation: str, *, has_search_bar: bool, clickables: list[str]) -> str:
    available = {"has_search_bar": has_search_bar, "clickables": clickables}
    return f"Observation:\n{observation}\n\nAvailable Actions:\n{available}"


def _reply(thought: str, action: str) -> str:
    return f"Thought:\nI think {thought}\n\nAction:\n{action}"


EXAMPLE: tuple[Mapping[str, str], ...] = (
    {
        "role": "user",
        "content": _turn(f"WebShop [SEP] {_INSTRUCTION} Search", has_search_bar=True, clickables=["search"]),
    },
    {
        "role": "assistant",
        "content": _reply("I should search for the kind of bottle first.", "search[steel water bottle 20 ounce]"),
    },
    {
        "role": "user",
        "content": _turn(
            f"{_INSTRUCTION} Back to Search [SEP] Page 1 (Total results: 2) [SEP] Next > [SEP] B0EXAMPLE1 [SEP] Example "
            "Steel Water Bottle, 20 Ounce [SEP] $18.5 [SEP] B0EXAMPLE2 [SEP] Example Glass Jug [SEP] $12.0",
            has_search_bar=False,
            clickables=["back to search", "next >", "b0example1", "b0example2"],
        ),
    },
    {"role": "assistant", "content": _reply("the first one fits; I look at it.", "click[B0EXAMPLE1]")},
    {"role": "user", "content": _turn(_ITEM, has_search_bar=False, clickables=_ITEM_CLICKS)},
    {"role": "assistant", "content": _reply("it must be blue.", "click[blue]")},
    {"role": "user", "content": _turn(_ITEM, has_search_bar=False, clickables=_ITEM_CLICKS)},
    {"role": "assistant", "content": _reply("color, size and price are right, so I buy it.", "click[Buy Now]")},
)
OPENING: tuple[Mapping[str, str], ...] = (
    {"role": "user", "content": RULES},
    {"role": "assistant", "content": "Ok."},
    *EXAMPLE,
)


def shown(visit: Visit, style: Style, mode: WebshopPage) -> str:
    """The next message to the policy."""
    page = visit.page
    if mode == "text":
        observation = page.text()
    else:
        observation = page.url if mode == "url" else page.text_rich(visit.visited)
    if style == "bare":
        return observation
    return _turn(observation, has_search_bar=page.has_search_bar, clickables=page.clickables)


def action_of(reply: str, style: Style) -> str | None:
    """None: the reply names no action."""
    if style == "bare":
        return reply
    return _bracketed(reply)


def _bracketed(reply: str) -> str | None:
    """The first ``search[...]`` or ``click[...]`` after an announcement, closed on its line and not empty."""
    open_until = 0  # no bracket closes before: many beginnings on one line search for one once
    for begins in _BEGINNING.finditer(reply):
        if begins.end() + 1 < open_until:
            continue
        line_end = reply.find("\n", begins.end())
        open_until = len(reply) if line_end < 0 else line_end
        closed = reply.find("]", begins.end() + 1, open_until)
        if closed >= 0:
            return reply[begins.start(1) : closed + 1]
    return None


def admissible(visit: Visit) -> list[str]:
    """Every click, and the form of a search where there is a search bar."""
    page = visit.page
    if page.has_search_bar:
        return ["search[keywords]"]
    return [f"click[{value}]" for value in page.clickables]
