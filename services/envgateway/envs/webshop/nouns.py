"""Finds nouns in a product's name: the reward compares them.

The tagger decides rewards, so results are comparable only between runs with the same one.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from services.common.config.processes.environments import WebshopConfig
from services.common.errors import ConfigError

Tagger = Callable[[str], tuple[str, ...]]  # a name -> its nouns, lower-cased, in order

_WORD = re.compile(r"[a-zA-Z]+")
_NOUNS = ("NOUN", "PROPN")
_REMEMBERED = 65536  # names; tagging one takes spaCy milliseconds


def every_word(name: str) -> tuple[str, ...]:
    """Replaces a tagger: all words made of letters."""
    return tuple(word.lower() for word in _WORD.findall(name))


def spacy_tagger(model: str) -> Tagger:
    """WebShop's own. Raises ``ConfigError`` when spaCy or the model is not installed."""
    try:
        import spacy
    except ImportError as error:
        raise ConfigError(
            "envgateway.webshop.tagger: spacy needs the extra webshop: pip install millrace[webshop]"
        ) from error
    try:
        parse: Any = spacy.load(model)
    except OSError as error:
        raise ConfigError(
            f"envgateway.webshop.spacy_model: run `python -m spacy download {model}`, or name a folder that holds a model: {error}"
        ) from error
    return lru_cache(_REMEMBERED)(lambda name: tuple(t.text.lower() for t in parse(name) if t.pos_ in _NOUNS))


def tagger_of(config: WebshopConfig) -> Tagger:
    return every_word if config.tagger == "words" else spacy_tagger(config.spacy_model)
