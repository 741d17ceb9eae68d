"""An agent of any framework, through the OpenAI-compatible endpoint (``pip install openai``): a tool loop.

inference: {a: {endpoint: {port: 0}}}
workflow: {name: external_agent, settings: {agent: "agent:agent", arguments: {max_turns: 3}}}
"""

import json

from openai import AsyncOpenAI

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}


async def agent(task, base_url: str, session: str, max_turns: int = 4) -> float:
    """Ask, run the tool, ask again; the reward is whether the last answer has the sum."""
    messages = [{"role": "user", "content": task["question"]}]
    async with AsyncOpenAI(base_url=base_url, api_key=session) as client:
        for _ in range(max_turns):
            answer = await client.chat.completions.create(model="default", messages=messages, tools=[ADD])
            said = answer.choices[0].message
            messages.append(said.model_dump(exclude_none=True))
            if not said.tool_calls:
                break
            for call in said.tool_calls:
                numbers = json.loads(call.function.arguments)
                total = numbers.get("a", 0) + numbers.get("b", 0)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": str(total)})
    return float(str(task["answer"]) in (said.content or ""))
