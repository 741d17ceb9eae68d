"""A peer counts as live while answering; the time since its last answer is known."""

from __future__ import annotations

import asyncio

from services.common.rpc.run_client import PeerWatch
from services.common.rpc.server import Server
from services.common.telemetry.accounts import TimeAccount
from tests.waiting import until


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
