"""Prompts for ALFWorld; all other text comes from the engine.

The form is AgentBench's: an instruction, a promise to follow the instruction, one example of the same type of task,
then the task with the actions that are possible now. The words are our own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from services.envgateway.envs.replies import offer

USER, AGENT = "user", "assistant"

INSTRUCTION = """\
You are a robot in a household and have one task to complete by acting in it, step by step. You are told what the room \
looks like and what to achieve; after each of your actions you are told what happened, and which actions are possible next.

Each reply is one of these two:

THOUGHT: what you make of the situation and what you plan
ACTION: one of the available actions

or, when there is nothing to think about,

ACTION: one of the available actions

Copy the action from the list of available actions, word for word: anything else does not count as an action. One action \
per reply. If you hear "Nothing happens.", the action had no effect and you should try another one. Things are often in \
closed places, and you can carry one thing at a time. Think when it helps, act whenever you can.
"""

PROMISE = "Understood. I will reply in that form and work towards the goal."

EXAMPLE_LEAD = "Here is an example of how it goes.\n"
TASK_LEAD = "Now your own task. "

_PLACE = (
    """\
You are in the middle of a room. Looking quickly around you, you see a armchair 1, a coffeetable 1, a drawer 2, \
a drawer 1, a garbagecan 1, a shelf 1, a sidetable 1, and a sofa 1.
Your task is to: put some keychain on sofa.
""",
    """\
THOUGHT: I need a keychain. Keys are left on tables or kept in drawers, so I look at the sidetable first, then into the \
drawers, and carry the keychain to the sofa.
ACTION: go to sidetable 1""",
    "You arrive at sidetable 1. On the sidetable 1, you see a remotecontrol 1, and a vase 2.\n",
    "ACTION: go to drawer 1",
    "You arrive at drawer 1. The drawer 1 is closed.\n",
    "ACTION: open drawer 1",
    "You open the drawer 1. The drawer 1 is open. In it, you see a keychain 1, and a pen 1.\n",
    "ACTION: take keychain 1 from drawer 1",
    "You pick up the keychain 1 from the drawer 1.\n",
    "ACTION: go to sofa 1",
    "You arrive at sofa 1. On the sofa 1, you see a newspaper 1.\n",
    "ACTION: move keychain 1 to sofa 1",
)

_EXAMINE = (
    """\
You are in the middle of a room. Looking quickly around you, you see a bed 1, a desk 1, a drawer 1, a garbagecan 1, \
a shelf 2, a shelf 1, and a sidetable 1.
Your task is to: look at cd under the desklamp.
""",
    """\
THOUGHT: I have to hold a cd and switch on a desklamp beside it. A cd may lie on the desk, where a desklamp may be, too.
ACTION: go to desk 1""",
    "You arrive at desk 1. On the desk 1, you see a book 1, a laptop 1, and a pencil 2.\n",
    "ACTION: go to shelf 1",
    "You arrive at shelf 1. On the shelf 1, you see a cd 2, and a statue 1.\n",
    "ACTION: take cd 2 from shelf 1",
    "You pick up the cd 2 from the shelf 1.\n",
    """\
THOUGHT: The cd is in my hand. I have not seen the desklamp yet; the sidetable by the bed is a likely place.
ACTION: go to sidetable 1""",
    "You arrive at sidetable 1. On the sidetable 1, you see a alarmclock 1, and a desklamp 1.\n",
    "ACTION: use desklamp 1",
)

_CLEAN = (
    """\
You are in the middle of a room. Looking quickly around you, you see a cabinet 2, a cabinet 1, a countertop 1, \
a diningtable 1, a drawer 1, a fridge 1, a garbagecan 1, a sinkbasin 1, and a stoveburner 1.
Your task is to: put a clean fork in drawer.
""",
    """\
THOUGHT: First I find a fork, probably on the diningtable. Then I wash it in the sinkbasin and put it into the drawer.
ACTION: go to diningtable 1""",
    "You arrive at diningtable 1. On the diningtable 1, you see a fork 1, a plate 3, and a saltshaker 1.\n",
    "ACTION: take fork 1 from diningtable 1",
    "You pick up the fork 1 from the diningtable 1.\n",
    "ACTION: go to sinkbasin 1",
    "You arrive at sinkbasin 1. On the sinkbasin 1, you see nothing.\n",
    "ACTION: clean fork 1 with sinkbasin 1",
    "You clean the fork 1 using the sinkbasin 1.\n",
    "ACTION: go to drawer 1",
    "You arrive at drawer 1. The drawer 1 is closed.\n",
    "ACTION: open drawer 1",
    "You open the drawer 1. The drawer 1 is open. In it, you see a spoon 1.\n",
    "ACTION: move fork 1 to drawer 1",
)

_HEAT = (
    """\
You are in the middle of a room. Looking quickly around you, you see a cabinet 1, a coffeemachine 1, a countertop 2, \
a countertop 1, a fridge 1, a garbagecan 1, a microwave 1, a sinkbasin 1, and a stoveburner 1.
Your task is to: put a hot mug in coffeemachine.
""",
    """\
THOUGHT: I need a mug, and the microwave to heat it. Mugs stand on countertops.
ACTION: go to countertop 1""",
    "You arrive at countertop 1. On the countertop 1, you see a bread 1, and a knife 1.\n",
    "ACTION: go to countertop 2",
    "You arrive at countertop 2. On the countertop 2, you see a mug 1, and a papertowelroll 1.\n",
    "ACTION: take mug 1 from countertop 2",
    "You pick up the mug 1 from the countertop 2.\n",
    "ACTION: go to microwave 1",
    "You arrive at microwave 1. The microwave 1 is closed.\n",
    """\
THOUGHT: I can heat the mug as it is; the microwave need not be opened by me.
ACTION: heat mug 1 with microwave 1""",
    "You heat the mug 1 using the microwave 1.\n",
    "ACTION: go to coffeemachine 1",
    "You arrive at coffeemachine 1. On the coffeemachine 1, you see nothing.\n",
    "ACTION: move mug 1 to coffeemachine 1",
)

_COOL = (
    """\
You are in the middle of a room. Looking quickly around you, you see a cabinet 1, a countertop 1, a diningtable 1, \
a fridge 1, a garbagecan 1, a sinkbasin 1, a stoveburner 2, and a stoveburner 1.
Your task is to: cool some potato and put it in garbagecan.
""",
    """\
THOUGHT: I look for a potato, cool it with the fridge and throw it away. I start at the countertop.
ACTION: go to countertop 1""",
    "You arrive at countertop 1. On the countertop 1, you see a bowl 2, a potato 1, and a spatula 1.\n",
    "ACTION: take potato 1 from countertop 1",
    "You pick up the potato 1 from the countertop 1.\n",
    "ACTION: go to fridge 1",
    "You arrive at fridge 1. The fridge 1 is closed.\n",
    "ACTION: cool potato 1 with fridge 1",
    "You cool the potato 1 using the fridge 1.\n",
    "ACTION: go to garbagecan 1",
    "You arrive at garbagecan 1. On the garbagecan 1, you see nothing.\n",
    "ACTION: move potato 1 to garbagecan 1",
)

_TWO = (
    """\
You are in the middle of a room. Looking quickly around you, you see a bathtubbasin 1, a cabinet 2, a cabinet 1, \
a countertop 1, a garbagecan 1, a sinkbasin 1, a toilet 1, and a towelholder 1.
Your task is to: put two soapbottle in cabinet.
""",
    """\
THOUGHT: I can carry one soapbottle at a time, so I need two trips to the same cabinet. I look at the countertop first.
ACTION: go to countertop 1""",
    "You arrive at countertop 1. On the countertop 1, you see a candle 1, a soapbottle 2, and a soapbottle 1.\n",
    "ACTION: take soapbottle 1 from countertop 1",
    "You pick up the soapbottle 1 from the countertop 1.\n",
    "ACTION: go to cabinet 1",
    "You arrive at cabinet 1. The cabinet 1 is closed.\n",
    "ACTION: open cabinet 1",
    "You open the cabinet 1. The cabinet 1 is open. In it, you see nothing.\n",
    "ACTION: move soapbottle 1 to cabinet 1",
    "You move the soapbottle 1 to the cabinet 1.\n",
    """\
THOUGHT: One is in place. The other is where I found the first.
ACTION: go to countertop 1""",
    "You arrive at countertop 1. On the countertop 1, you see a candle 1, and a soapbottle 2.\n",
    "ACTION: take soapbottle 2 from countertop 1",
    "You pick up the soapbottle 2 from the countertop 1.\n",
    "ACTION: go to cabinet 1",
    "You arrive at cabinet 1. The cabinet 1 is open. In it, you see a soapbottle 1.\n",
    "ACTION: move soapbottle 2 to cabinet 1",
)

# By the first part of a game's folder; user and agent take turns, the agent last.
EXAMPLES: dict[str, Sequence[str]] = {
    "pick_and_place": _PLACE,
    "look_at_obj": _EXAMINE,
    "pick_clean_then_place": _CLEAN,
    "pick_heat_then_place": _HEAT,
    "pick_cool_then_place": _COOL,
    "pick_two_obj": _TWO,
}


def example_for(folder: str) -> Sequence[str]:
    """The example for the type of task that a game's folder is named for; a plain one for any other name."""
    return next((example for prefix, example in EXAMPLES.items() if folder.startswith(prefix)), _PLACE)


def opening(folder: str, room: str, admissible: Sequence[str]) -> list[dict[str, str]]:
    """The conversation up to the policy's first turn."""
    example = example_for(folder)
    first, *rest = example
    messages = [
        {"role": USER, "content": INSTRUCTION},
        {"role": AGENT, "content": PROMISE},
        {"role": USER, "content": EXAMPLE_LEAD + first},
    ]
    messages += [{"role": (AGENT, USER)[turn % 2], "content": text} for turn, text in enumerate(rest)]
    messages.append({"role": USER, "content": TASK_LEAD + room + offer(admissible)})
    return messages


def as_text(messages: Sequence[Mapping[str, str]]) -> str:
    """The opening as one message, for a policy that starts with one: the instruction, the example, the task."""
    instruction, _, *example, task = (message["content"] for message in messages)
    return "\n".join([instruction, *(text.strip() for text in example), "", task])
