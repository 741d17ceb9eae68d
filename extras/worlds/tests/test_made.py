"""What is made here can be played: goals of a catalogue are found and bought, houses are won by their own commands."""

from __future__ import annotations

from pathlib import Path

import pytest

from extras.worlds.alfworld import AlfworldWorld
from extras.worlds.made import houses, package_data, write_catalogue, write_games
from extras.worlds.settings import AlfworldConfig, WebshopConfig
from extras.worlds.webshop_pages import WebshopEnvironment, WebshopWorld


async def test_the_first_hit_of_every_instruction_is_worth_buying(tmp_path: Path) -> None:
    assert write_catalogue(tmp_path, 12, seed=1) == 12
    world = WebshopWorld(WebshopConfig(data=tmp_path))
    try:
        shop = await world.shop()
        assert len(shop.goals) == 12
        for index, goal in enumerate(shop.goals):
            environment: WebshopEnvironment = world.build()
            await environment.reset({"index": index}, seed=0)
            (first, *_) = shop.find(goal.instruction)
            for action in (f"search[{goal.instruction}]", f"click[{first}]", "click[Buy Now]"):
                result = environment.step(f"Action: {action}")
            assert result.done
            assert result.reward > 0.3, goal
    finally:
        await world.close()


@pytest.mark.needs("alfworld")
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
