"""Servers of MCP over standard input and output, by the package's client."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from extras.mcp import servers as server_module
from extras.mcp.servers import McpServers
from extras.mcp.settings import McpServerConfig
from services.common.errors import CapacityError, InfrastructureError, InvalidRequestError
from services.common.text.tools import ToolStatus
from services.envgateway.tools.registry import GatewayToolSession, ToolBox
from services.envgateway.tools.tools import StateLostError
from tests.running import is_running
from tests.waiting import until, wait_until

pytestmark = [pytest.mark.needs("mcp"), pytest.mark.slow]

RAW = str(Path(__file__).with_name("raw_server.py"))


def raw(*arguments: str, **settings: Any) -> McpServerConfig:
    return McpServerConfig(command=[sys.executable, "-S", RAW, *arguments], **settings)


@asynccontextmanager
async def serving(**configs: McpServerConfig) -> AsyncIterator[ToolBox]:
    """A box with servers; at the end no session of theirs is left."""
    box = ToolBox([], servers=McpServers(configs))
    try:
        yield box
    finally:
        await box.close()
        assert all(box.gauges[f"mcp_{name}_sessions"] == 0 for name in configs)


def call(name: str, **arguments: Any) -> str:
    return json.dumps({"name": name, "arguments": arguments})


async def test_tools_are_offered_with_their_schemas_and_answer() -> None:
    async with serving(a=raw()) as box:
        session = await GatewayToolSession.open(box, ["mcp:a/echo", "mcp:a/count"])
        assert [schema["function"]["name"] for schema in session.schemas] == ["echo", "count"]
        assert session.schemas[0]["function"]["parameters"]["required"] == ["text"]
        result = await session.answer(call("echo", text="héllo"))
        assert (result.text, result.status) == ("héllo", ToolStatus.OK)
        for content, status in (
            (call("echo", text=7), ToolStatus.INVALID_ARGUMENTS),
            (call("big", number=1), ToolStatus.UNKNOWN_TOOL),  # not offered to this session
            ("{", ToolStatus.MALFORMED_CALL),
        ):
            assert (await session.answer(content)).status == status
        await session.close()


async def test_odd_answers_of_a_server_that_prints_are_told_or_are_failures() -> None:
    async with serving(a=raw("--say", "Loading the index..."), b=raw(prefix="b_", sessions="shared")) as box:
        session = await GatewayToolSession.open(box, ["mcp:a", "mcp:b"])
        result = await session.answer(call("refuse"))
        assert (result.text, result.status) == ("Error: no such month", ToolStatus.TOOL_ERROR)
        assert box.gauges["mcp_a_failures"] == 0, "a protocol error about the arguments is the policy's"
        assert (await session.answer(call("b_echo", text="x"))).text == "x"
        with pytest.raises(InfrastructureError):
            await session.answer(call("b_broken"))


async def test_a_result_of_ten_megabytes_is_cut_and_says_so() -> None:
    async with serving(a=raw(timeout_s=20.0, max_chars=200)) as box:
        session = await GatewayToolSession.open(box, ["mcp:a"])
        result = await session.answer(call("big", number=1_000_000))
        assert len(result.text) <= 200
        assert result.text.endswith("(1000000 characters, cut to 200)")
        shorter = await GatewayToolSession.open(box, ["mcp:a"], 64)
        assert len((await shorter.answer(call("big", number=500))).text) <= 64


async def test_sessions_of_episodes_have_states_of_their_own_and_end_with_them() -> None:
    async with serving(a=raw()) as box:
        one, other = [await GatewayToolSession.open(box, ["mcp:a"]) for _ in range(2)]
        assert [(await session.answer(call("count"))).text for session in (one, one, other)] == ["1", "2", "1"]
        await one.close()
        await until(lambda: box.gauges["mcp_a_sessions"] == 1)
        await other.close()


async def test_a_shared_session_is_one_for_all() -> None:
    async with serving(a=raw(sessions="shared")) as box:
        sessions = [await GatewayToolSession.open(box, ["mcp:a"]) for _ in range(3)]
        told = await asyncio.gather(*(session.answer(call("count")) for session in sessions))
        assert sorted(result.text for result in told) == ["1", "2", "3"]
        assert box.gauges["mcp_a_sessions"] == 1


async def test_a_place_is_waited_for_and_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "_PLACE_S", 0.05)
    async with serving(a=raw(max_sessions=1)) as box:
        first = await GatewayToolSession.open(box, ["mcp:a"])
        with pytest.raises(CapacityError, match="max_sessions"):
            await GatewayToolSession.open(box, ["mcp:a"])
        await first.close()
        monkeypatch.setattr(server_module, "_PLACE_S", 10.0)
        await (await GatewayToolSession.open(box, ["mcp:a"])).close()


@pytest.mark.parametrize("ending", ["die", "hang"])
async def test_a_server_that_ends_or_hangs_is_started_again_and_the_call_is_no_result(
    ending: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from extras.mcp import client as mcp_client

    monkeypatch.setattr(mcp_client, "_PING_S", 0.2)
    async with serving(a=raw(sessions="shared", timeout_s=0.3)) as box:
        session = await GatewayToolSession.open(box, ["mcp:a"])
        with pytest.raises(InfrastructureError, match=r"envgateway\.mcp\.a"):
            await session.answer(call(ending))
        assert box.gauges["mcp_a_failures"] == 3, "the call was repeated on new sessions"
        assert box.counts["infrastructure"] == 1
        assert not session.statistics.metrics()["tool_calls"], "no failure is counted against the policy"
        box.servers._servers["a"].config = raw(sessions="shared")
        assert (await session.answer(call("echo", text="again"))).text == "again"


async def test_a_lost_state_loses_the_episode() -> None:
    async with serving(a=raw()) as box:
        session = await GatewayToolSession.open(box, ["mcp:a"])
        await session.answer(call("count"))
        with pytest.raises(StateLostError, match="state is lost"):
            await session.answer(call("die"))
        with pytest.raises(StateLostError):
            await session.answer(call("count"))
        await session.close()


async def test_a_server_that_was_killed_between_calls_is_started_again_where_there_is_no_state(tmp_path: Path) -> None:
    log = tmp_path / "pids"
    async with serving(a=raw("--log", str(log))) as box:
        session = await GatewayToolSession.open(box, ["mcp:a"])
        os.kill(int(log.read_text()), 9)
        assert (await session.answer(call("echo", text="here"))).text == "here"
    assert not [pid for pid in log.read_text().split() if is_running(int(pid))]


async def test_a_slow_tool_of_a_server_that_answers_is_told_to_the_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    from extras.mcp import client as mcp_client

    monkeypatch.setattr(mcp_client, "_PING_S", 30.0)
    async with serving(a=raw(timeout_s=0.2)) as box:
        session = await GatewayToolSession.open(box, ["mcp:a"])
        result = await session.answer(call("slow", number=30))
        assert (result.text, result.status) == ("TimeoutError: stopped after 0.2 s", ToolStatus.TIME_LIMIT)
        assert box.gauges["mcp_a_failures"] == 0


@pytest.mark.parametrize(
    ("config", "told"),
    [
        (raw("--fail", "no licence"), r"does not start.*no licence"),
        (raw("--mute", start_timeout_s=0.3), r"did not list its tools within 0\.3 s"),
    ],
)  # fmt: skip
async def test_a_server_that_does_not_start_is_an_infrastructure_failure_with_its_last_words(
    config: McpServerConfig, told: str
) -> None:
    async with serving(a=config) as box:
        with pytest.raises(InfrastructureError, match=told):
            await GatewayToolSession.open(box, ["mcp:a"])
        assert box.gauges["mcp_a_failures"] == 1


def _schema(**parts: Any) -> str:
    return json.dumps({"type": "object", **parts})


@pytest.mark.parametrize(
    ("schema", "told"),
    [
        (_schema(properties={"text": {"type": "strin"}}), "the schema of the tool 'echo' is invalid: inputSchema.properties.text.type: 'strin'"),
        (_schema(required="text"), "the schema of the server's tool 2 is invalid: inputSchema.required: Input should be a valid list"),
    ],
)  # fmt: skip
async def test_an_invalid_schema_is_refused_with_the_name_of_its_tool(schema: str, told: str) -> None:
    async with serving(a=raw("--schema", schema)) as box:
        with pytest.raises(InvalidRequestError) as refused:
            await GatewayToolSession.open(box, ["mcp:a"])
        assert f"envgateway.mcp.a: {told}" in refused.value.message


@pytest.mark.parametrize(
    ("config", "names", "told"),
    [
        (raw(), ["mcp:b"], "no MCP server 'mcp:b'; envgateway.mcp has mcp:a"),
        (raw(), ["mcp:a/ecco"], "no tool 'ecco'; it has count, echo"),
        (raw(), ["mcp:a", "mcp:a/echo"], "two tools named 'echo'"),
        (raw(tools=["ecco"]), ["mcp:a"], "envgateway.mcp.a.tools names 'ecco', which the server lacks"),
        (McpServerConfig(command=["no-such-program"]), ["mcp:a"], "no program 'no-such-program' on the PATH"),
        (McpServerConfig(command=["true"], environment={"K": "$NOT_SET_HERE"}), ["mcp:a"], "export NOT_SET_HERE"),
        (McpServerConfig(command=["true"], directory=Path("/no/where")), ["mcp:a"], "no directory /no/where"),
    ],
)  # fmt: skip
async def test_what_the_recipe_says_wrong_is_told(config: McpServerConfig, names: list[str], told: str) -> None:
    async with serving(a=config) as box:
        with pytest.raises(InvalidRequestError) as refused:
            await GatewayToolSession.open(box, names)
        assert told in refused.value.message


async def test_the_environment_of_the_gateway_does_not_reach_the_server(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SECRET_OF_THE_RUN", "s3cret")
    monkeypatch.setenv("GIVEN", "yes")
    seen = tmp_path / "seen"
    script = f"import os, json; open({str(seen)!r}, 'w').write(json.dumps(dict(os.environ)))"
    config = McpServerConfig(command=[sys.executable, "-S", "-c", script], environment={"WANTED": "$GIVEN"})
    async with serving(a=config) as box:
        with pytest.raises(InfrastructureError):
            await GatewayToolSession.open(box, ["mcp:a"])
    environment = json.loads(seen.read_text())
    assert environment["WANTED"] == "yes"
    assert "SECRET_OF_THE_RUN" not in environment


def test_a_killed_gateway_leaves_no_server(tmp_path: Path) -> None:
    log = tmp_path / "pids"
    program = (
        "import asyncio, sys\n"
        "from extras.mcp.settings import McpServerConfig\n"
        "from extras.mcp.servers import McpServer\n"
        "async def main():\n"
        f"    config = McpServerConfig(command=[sys.executable, '-S', {RAW!r}, '--log', {str(log)!r}])\n"
        "    await McpServer('a', config).take_own()\n"
        "    print('ready', flush=True)\n"
        "    await asyncio.sleep(3600)\n"
        "asyncio.run(main())\n"
    )
    gateway = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    assert gateway.stdout is not None
    assert gateway.stdout.readline() == b"ready\n"
    gateway.kill()
    gateway.wait()
    gateway.stdout.close()
    pid = int(log.read_text())
    wait_until(lambda: not is_running(pid), "the server ends with its gateway")


def test_settings_that_cannot_be_meant_are_refused() -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({}, "neither is set"),
        ({"command": ["a"], "url": "http://a"}, "both are set"),
        ({"url": "localhost:8000"}, "begins with http"),
        ({"command": ["a"], "headers": {"A": "b"}}, "leave headers out"),
        ({"url": "http://a", "environment": {"A": "b"}}, "leave environment out"),
    ]
    for settings, told in wrong:
        with pytest.raises(ValueError, match=told):
            McpServerConfig(**settings)
