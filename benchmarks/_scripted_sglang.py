"""A stand-in for an SGLang server that answers at once, in chunks of several tokens. Run as a script, by ``sglang_client.py``."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from aiohttp import web

from tests.integration.inference.sglang import fake_server

LOGPROB = -0.25
CHUNK_TOKENS = 16


class Scripted(fake_server.Fake):
    """Streams the numbers after the prompt's last token; waits ``token_s`` for each chunk."""

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        count = body["sampling_params"]["max_new_tokens"]
        for begin in range(0, count, CHUNK_TOKENS):
            await asyncio.sleep(self.token_s)
            tokens = [(begin + place) % fake_server.VOCABULARY for place in range(min(CHUNK_TOKENS, count - begin))]
            done = begin + len(tokens) == count
            meta: dict[str, Any] = {
                "finish_reason": {"type": "length"} if done else None,
                "weight_version": self.version,
                "output_token_logprobs": [[LOGPROB, token, None] for token in tokens],
            }
            if done:
                meta["weight_versions"] = [{"version": self.version, "start": 0, "end": count}]
            row = json.dumps({"output_ids": tokens, "meta_info": meta}).encode()
            await response.write(b"data: " + row + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response


if __name__ == "__main__":
    fake_server.Fake = Scripted  # type: ignore[misc]
    fake_server.main()
