"""The agent of ``agent.py`` with Anthropic's client (``pip install anthropic``): a tool loop.

inference: {a: {endpoint: {port: 0}}}
workflow: {name: external_agent, settings: {agent: "anthropic_agent:agent", arguments: {max_turns: 3}}}
"""

from anthropic import AsyncAnthropic

ADD = {
    "name": "add",
    "description": "Add two integers.",
    "input_schema": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
}


async def agent(task, base_url: str, session: str, max_turns: int = 4) -> float:
    """Ask, run the tool, ask again; the reward is whether the last answer has the sum."""
    messages = [{"role": "user", "content": task["question"]}]
    async with AsyncAnthropic(base_url=base_url, api_key=session) as client:
        for _ in range(max_turns):
            answer = await client.messages.create(model="default", max_tokens=256, messages=messages, tools=[ADD])
            messages.append({"role": "assistant", "content": answer.content})
            calls = [block for block in answer.content if block.type == "tool_use"]
            if not calls:
                break
            results = [
                {
                    "type": "tool_result",
                    "tool_use_id": call.id,
                    "content": str(call.input.get("a", 0) + call.input.get("b", 0)),
                }
                for call in calls
            ]
            messages.append({"role": "user", "content": results})
    said = "".join(block.text for block in answer.content if block.type == "text")
    return float(str(task["answer"]) in said)
