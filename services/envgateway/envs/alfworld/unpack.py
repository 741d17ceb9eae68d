"""Write games that are kept as rows into the tree of folders that ALFWorld reads.

    python -m services.envgateway.envs.alfworld.unpack games.jsonl domain.json FOLDER

A row holds `game` (the relative path of its file), `grammar`, `pddl_problem` and `walkthrough`, and the fields of its
`traj_data.json` for other tools: `task_type`, `pddl_params`, `scene`. `domain.json` holds `pddl_domain`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


def unpack(rows: Path, domain: Path, folder: Path) -> list[str]:
    """The games written, in order, as paths relative to ``folder``."""
    pddl_domain = json.loads(domain.read_text(encoding="utf-8"))["pddl_domain"]
    lines = rows.read_text(encoding="utf-8").splitlines()
    return write_games(map(json.loads, lines), pddl_domain, folder)


def write_games(rows: Iterable[Mapping[str, Any]], pddl_domain: str, folder: Path) -> list[str]:
    """Write games from rows in memory."""
    names = []
    for row in rows:
        path = folder / row["game"]
        path.parent.mkdir(parents=True, exist_ok=True)
        game = {key: row[key] for key in ("grammar", "pddl_problem", "walkthrough")}
        path.write_text(json.dumps({"pddl_domain": pddl_domain, **game, "solvable": True}), encoding="utf-8")
        about = {key: row[key] for key in ("task_type", "pddl_params", "scene")}
        about |= {"plan": {"high_pddl": []}, "turk_annotations": {"anns": []}}
        path.with_name("traj_data.json").write_text(json.dumps(about), encoding="utf-8")
        names.append(row["game"])
    return names


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m services.envgateway.envs.alfworld.unpack",
        description="Write games kept as rows of JSON into the folders that ALFWorld reads.",
    )
    parser.add_argument("games", type=Path, help="file with a game per line")
    parser.add_argument("domain", type=Path, help="file with the PDDL domain")
    parser.add_argument("folder", type=Path, help="the data folder to make (envgateway.alfworld.data)")
    arguments = parser.parse_args()
    try:
        names = unpack(arguments.games, arguments.domain, arguments.folder)
    except (OSError, ValueError, KeyError) as error:
        sys.exit(f"error: {type(error).__name__}: {error}")
    sys.stdout.write(f"{len(names)} games below {arguments.folder}\n")


if __name__ == "__main__":
    main()
