"""A verifiers harness that runs in the environment's own process: chat completions and the task's tools until a turn calls none.

It does what the package's harness ``null`` does, without starting an interpreter for each rollout. ``__all__`` and the
module's name are how the package finds a harness.
"""

from __future__ import annotations

import functools
import json
from contextlib import AsyncExitStack
from typing import Any

from openai import APIStatusError, AsyncOpenAI, DefaultAsyncHttpxClient
from verifiers.v1 import Harness, HarnessConfig, ModelContext, ProgramResult, Runtime, TaskData, Trace
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp

__all__ = ["ChatHarness"]


@functools.cache
def _connections() -> DefaultAsyncHttpxClient:
    """One pool for the process: each new one would read all certificate authorities again."""
    return DefaultAsyncHttpxClient(timeout=None)


_DONE = ProgramResult(exit_code=0, stdout="", stderr="")


class ChatHarnessConfig(HarnessConfig):  # type: ignore[misc]
    pass


class ChatHarness(Harness[ChatHarnessConfig]):  # type: ignore[misc]
    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: ModelContext,
        trace: Trace,
        runtime: Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: TaskData,
    ) -> ProgramResult:
        """Play one segment of the conversation."""
        messages = self._messages(data)
        # No retries: a request that is sent again would be sampled, and trained, twice.
        client = AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0, http_client=_connections())
        async with AsyncExitStack() as stack:
            servers = {name: {"url": url, "timeout": self.config.tool_timeout} for name, url in mcp_urls.items()}
            tools, dispatch, connections = await connect_mcp({"mcpServers": servers}, stack)
            while True:
                request: dict[str, Any] = {"model": ctx.model, "messages": messages}
                if tools:
                    request["tools"] = tools
                try:
                    completion = await client.chat.completions.create(**request)
                except APIStatusError as error:
                    if "context_length_exceeded" in str(error):
                        return _DONE  # the conversation so far counts
                    raise
                said = completion.choices[0].message
                messages.append(said.model_dump(exclude_none=True))
                if not said.tool_calls:
                    return _DONE
                for call in said.tool_calls:
                    content = await _result(call.function, dispatch, connections)
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": content})

    def _messages(self, data: TaskData) -> list[dict[str, Any]]:
        system, prompt = self.resolve_prompt(data)
        messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        elif prompt is not None:
            messages += [message_to_wire(message) for message in prompt]
        return messages


async def _result(function: Any, dispatch: dict[str, Any], connections: dict[str, Any]) -> Any:
    """The result of a call as the policy reads it; a call that cannot be made is an error in the conversation."""
    try:
        arguments = json.loads(function.arguments or "{}")
    except ValueError as error:
        return f"error: the arguments are no JSON: {error}"
    if not isinstance(arguments, dict):
        return f"error: the arguments must be an object, not {type(arguments).__name__}"
    if function.name not in dispatch:
        return f"error: there is no tool {function.name!r}; there is {', '.join(dispatch) or 'none'}"
    return await call_mcp(connections, dispatch, function.name, arguments)
