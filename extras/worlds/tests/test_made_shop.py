"""The made catalogue fits WebShop's rules: the goals can be found and bought."""

from __future__ import annotations

from pathlib import Path

from extras.worlds.made import write_catalogue
from extras.worlds.webshop_pages import WebshopEnvironment, WebshopWorld
from services.common.config.envgateway import WebshopConfig


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
