"""The examples on the pages of docs/, for tests that run them."""

from __future__ import annotations

import re
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"


def blocks(page: str, language: str) -> list[str]:
    """The fenced blocks of one language on a page, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```", (DOCS / page).read_text(), flags=re.DOTALL | re.MULTILINE)


def files(page: str) -> dict[str, str]:
    """The fenced blocks that have a title, by title: files that the reader writes."""
    text = (DOCS / page).read_text()
    return dict(re.findall(r'^```\w+ title="([^"]+)"\n(.*?)^```', text, flags=re.DOTALL | re.MULTILINE))
