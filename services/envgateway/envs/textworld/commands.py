"""Filters commands for a game: commands of its world pass, commands of its interpreter do not.

The interpreter reads some commands itself: ``save`` and ``script`` write files on the gateway's machine, ``quit`` and
``restart`` begin a dialogue outside the game, ``tw-trace-actions`` turns off the list of actions, and a line that
begins with a backslash is an order to the interpreter's screen, which may never return. A game's own words are plain
letters.
"""

from __future__ import annotations

import re

REFUSED = "That is no command of this game.\n"

_MOST_CHARS = 200  # more does not fit into an interpreter's line
_WORDS = re.compile(r"[a-z0-9 ',.;:!?\"-]+")
_SENTENCE_END = re.compile(r"[.,;:!?\"]| then | and ")
# Inform's words for the interpreter, and those of its testing that a game may have been compiled with.
_META = """
    save restore restart quit q undo oops script transcript noscript unscript recording replay verify restrict notify
    actions changes gonear goto random routines messages scope showdict dict showobj showverb timers daemons trace
    abstract purloin tree glklist showme test rules relations showheap scenes
"""
_OF_THE_INTERPRETER = frozenset(_META.split())


def is_of_the_game(command: str) -> bool:
    """Whether a lower-cased command may be given to the game.

    >>> is_of_the_game("take the knife, then go east"), is_of_the_game("look. save"), is_of_the_game("\\\\x")
    (True, False, False)
    """
    if len(command) > _MOST_CHARS or not _WORDS.fullmatch(command):
        return False
    sentences = (sentence.split() for sentence in _SENTENCE_END.split(command))
    first_words = [words[0].strip("'-") for words in sentences if words]
    return bool(first_words) and not any(word in _OF_THE_INTERPRETER or word.startswith("tw-") for word in first_words)
