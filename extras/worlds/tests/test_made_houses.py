"""Houses that are made here are won in the real engine by the commands that they come with."""

from __future__ import annotations

from pathlib import Path

import pytest

from extras.worlds.alfworld import AlfworldWorld
from extras.worlds.made import houses, package_data, write_games
from services.common.config.envgateway import AlfworldConfig

pytestmark = pytest.mark.needs("alfworld")


async def test_made_houses_are_won_by_their_walkthrough(tmp_path: Path) -> None:
    package = package_data()
    rows = list(houses(2, 1, (package / "alfred.twl2").read_text()))
    write_games(rows, (package / "alfred.pddl").read_text(), tmp_path)
    world = AlfworldWorld(AlfworldConfig(data=tmp_path), tmp_path)
    try:
        for row in rows:
            episode = world.build()
            opening = await episode.reset({"game": row["game"]}, seed=0)
            assert row["walkthrough"][0] in opening.admissible_actions
            for action in row["walkthrough"]:
                result = await episode.step(f"ACTION: {action}")
            assert (result.reward, result.done) == (1.0, True)
            await episode.close()
    finally:
        await world.close()
