"""What the pages of docs/ show, for tests that run it."""

from __future__ import annotations

import re
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"


def blocks(page: str, language: str) -> list[str]:
    """The fenced blocks of one language on a page, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```", (DOCS / page).read_text(), flags=re.DOTALL | re.MULTILINE)
