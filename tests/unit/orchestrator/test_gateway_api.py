"""Membership of the environment gateway: its address, the informed replicas, and the tasks that wait for a gateway on
another node.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from services.common.errors import InvalidRequestError
from services.orchestrator.members import UseGateway
from services.orchestrator.services.pool import GatewayApi
from tests.unit.orchestrator.world import World

HERE, THERE = "192.0.2.2:50080", "192.0.2.3:50081"


async def test_a_gateway_of_node_0_is_where_the_recipe_says_and_nothing_waits_for_it(
    worlds: Callable[..., World],
) -> None:
    world = worlds(envgateway={"port": 50099})
    api = GatewayApi(world.core)
    assert api.address == "127.0.0.1:50099"
    api.join(HERE)
    api.left(HERE)
    assert api.address == "127.0.0.1:50099" and not world.core.dispatcher.holds


async def test_nothing_is_issued_until_the_gateway_of_another_node_has_joined(worlds: Callable[..., World]) -> None:
    world = worlds(envgateway={"node": 1})
    api = GatewayApi(world.core)
    replica = world.join()
    await world.publish(0)
    world.train()
    assert api.address == "" and await world.orders(replica) == []
    assert "gateway of node 1 (envgateway.node) has not joined" in world.core.dispatcher.held_back

    api.join(HERE)
    commands = await world.commands(replica)
    assert commands[0] == UseGateway(HERE), "before anything that needs it"
    assert len(commands) > 1 and api.address == HERE

    api.left(HERE)
    assert "envgateway" in world.core.dispatcher.holds
    assert api.address == HERE, "for replicas that join meanwhile: it may come back there"
    api.join(HERE)
    assert not world.core.dispatcher.holds
    assert UseGateway(HERE) not in await world.commands(replica), "which they know"


async def test_the_gateway_that_joined_last_counts_and_then_the_one_that_is_left(worlds: Callable[..., World]) -> None:
    world = worlds(envgateway={"node": 1})
    api = GatewayApi(world.core)
    replica = world.join()
    api.join(HERE)
    api.join(THERE)
    assert api.address == THERE
    api.left(THERE)
    assert api.address == HERE and not world.core.dispatcher.holds
    told = [command for command in await world.commands(replica) if isinstance(command, UseGateway)]
    assert told == [UseGateway(HERE), UseGateway(THERE), UseGateway(HERE)]


@pytest.mark.parametrize("place", ["", "here", "192.0.2.2:0", ":50080"])
async def test_an_address_that_nobody_could_dial_is_refused(worlds: Callable[..., World], place: str) -> None:
    with pytest.raises(InvalidRequestError, match="is no address"):
        GatewayApi(worlds(envgateway={"node": 1}).core).join(place)
