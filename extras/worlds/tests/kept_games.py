"""Games that the data root keeps as rows, in the tree of folders that ALFWorld reads."""

from __future__ import annotations

import json
from pathlib import Path

from extras.worlds.made import write_games


def unpack(rows: Path, folder: Path) -> list[str]:
    """The games written below ``folder``, in the order of the rows."""
    domain = json.loads((rows / "domain.json").read_text(encoding="utf-8"))["pddl_domain"]
    lines = (rows / "games.jsonl").read_text(encoding="utf-8").splitlines()
    return write_games(map(json.loads, lines), domain, folder)
