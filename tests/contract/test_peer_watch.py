"""A peer is known to live while it answers, and for how long it has not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from services.common.accounts import TimeAccount
from services.common.rpc.peer_watch import PeerWatch
from services.common.rpc.server import Server


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.02)


async def test_a_peer_is_asked_for_gauges_and_accounts_and_its_silence_grows() -> None:
    server = Server(service="envgateway", instance_id="envgateway", host="127.0.0.1", port=0)
    account = TimeAccount("envgateway")
    server.set_gauges(lambda: {"queue_workers": 2.0})
    server.set_accounts(lambda: [account.state()])
    await server.start()
    address = ""
    watch = PeerWatch("envgateway", lambda: address, every_s=0.05)
    asking = asyncio.create_task(watch.run())
    try:
        await asyncio.sleep(0.2)
        assert watch.state() is None, "nobody to ask yet"
        address = server.address
        await until(lambda: watch.state())
        state = watch.state()
        assert state is not None
        assert (state.silent_s, state.gauges["queue_workers"]) == (0.0, 2.0)
        assert [found.component for found in state.accounts] == ["envgateway"]
        await server.stop(0.0)
        await until(lambda: (known := watch.state()) is not None and known.silent_s > 0.5)
        state = watch.state()
        assert state is not None
        assert state.gauges["queue_workers"] == 2.0, "the last that was known"
        assert state.detail
    finally:
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await server.stop(0.0)
