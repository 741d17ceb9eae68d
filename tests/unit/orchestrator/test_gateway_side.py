"""The environment gateway as the orchestrator knows it: its address, who is told, and what waits for one on another node."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from services.common.errors import InvalidRequestError
from services.orchestrator.commands import UseGateway
from services.orchestrator.gateway_side import GatewaySide
from tests.unit.orchestrator.world import World

HERE, THERE = "192.0.2.2:50080", "192.0.2.3:50081"


async def test_a_gateway_of_node_0_is_where_the_recipe_says_and_nothing_waits_for_it(
    worlds: Callable[..., World],
) -> None:
    world = worlds(envgateway={"port": 50099})
    side = GatewaySide(world.ring)
    assert side.address == "127.0.0.1:50099"
    side.left(side.join(HERE))
    assert side.address == "127.0.0.1:50099" and not world.ring.dispatcher.holds


async def test_nothing_is_issued_until_the_gateway_of_another_node_has_joined(worlds: Callable[..., World]) -> None:
    world = worlds(envgateway={"node": 1})
    side = GatewaySide(world.ring)
    replica = world.join()
    await world.publish(0)
    world.train()
    assert side.address == "" and await world.orders(replica) == []
    assert "gateway of node 1 (envgateway.node) has not joined" in world.ring.dispatcher.held_back

    number = side.join(HERE)
    commands = await world.commands(replica)
    assert commands[0] == UseGateway(HERE), "before anything that needs it"
    assert len(commands) > 1 and side.address == HERE

    side.left(number)
    assert "envgateway" in world.ring.dispatcher.holds
    assert side.address == HERE, "for replicas that join meanwhile: it may come back there"
    side.join(HERE)
    assert not world.ring.dispatcher.holds
    assert UseGateway(HERE) not in await world.commands(replica), "which they know"


async def test_the_gateway_that_joined_last_counts_and_then_the_one_that_is_left(worlds: Callable[..., World]) -> None:
    world = worlds(envgateway={"node": 1})
    side = GatewaySide(world.ring)
    replica = world.join()
    side.join(HERE)
    second = side.join(THERE)
    assert side.address == THERE
    side.left(second)
    assert side.address == HERE and not world.ring.dispatcher.holds
    told = [command for command in await world.commands(replica) if isinstance(command, UseGateway)]
    assert told == [UseGateway(HERE), UseGateway(THERE), UseGateway(HERE)]


@pytest.mark.parametrize("place", ["", "here", "192.0.2.2:0", ":50080"])
async def test_an_address_that_nobody_could_dial_is_refused(worlds: Callable[..., World], place: str) -> None:
    with pytest.raises(InvalidRequestError, match="is no address"):
        GatewaySide(worlds(envgateway={"node": 1}).ring).join(place)
