"""Proxies of the environment are for the outside: services, engines and agents are reached without them."""

from __future__ import annotations

import asyncio
import os
import sys
import urllib.request

import openai
import pytest

from services.common.net.hosts import host_and_port
from services.common.pb import status_pb2, status_pb2_grpc
from services.common.rpc.client import channel, is_serving
from services.common.rpc.server import Server
from services.inference.workflows.external_agent import run_command
from tests.integration.inference.endpoint_peers import serving
from tests.waiting import WAIT_S

PROXIES = ("http_proxy", "https_proxy", "all_proxy", "grpc_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
ASK = "import os, urllib.request, urllib.error\ntry: urllib.request.urlopen(os.environ['OPENAI_BASE_URL'] + '/models')\nexcept urllib.error.HTTPError as error: print('{\"reward\": %d}' % error.code)"  # fmt: skip


@pytest.fixture(params=[None, "example.org"], ids=["no exemption", "another exemption"], autouse=True)
def _proxies(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in PROXIES:
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY", "no_grpc_proxy"):
        monkeypatch.setenv(name, request.param or "")
        if request.param is None:
            monkeypatch.delenv(name)


async def test_services_call_each_other_and_are_probed_directly() -> None:
    server = Server(service="orchestrator", instance_id="o", host="127.0.0.1", port=0)
    await server.start()
    server.set_ready()
    try:
        async with channel(server.address) as direct:
            stub = status_pb2_grpc.StatusServiceStub(direct)
            answer = await stub.GetStatus(status_pb2.GetStatusRequest(), timeout=WAIT_S)
        assert answer.service == "orchestrator"
        assert await asyncio.to_thread(is_serving, server.address)
    finally:
        await server.stop(0.0)


async def test_agents_reach_the_endpoint_directly_in_this_process_and_as_programs() -> None:
    async with serving() as server:
        async with openai.AsyncOpenAI(base_url=server.base_url, api_key="none", max_retries=0) as client:
            with pytest.raises(openai.APIStatusError):  # the endpoint's own: it knows no such session
                await client.models.list()
        assert await run_command([sys.executable, "-c", ASK], {}, server.base_url, "none", {}) in (401, 404)
        host, _ = host_and_port(server.base_url.removeprefix("http://").removesuffix("/v1"))
        assert urllib.request.proxy_bypass(host) and os.environ["http_proxy"], "the proxy itself stays for the outside"
