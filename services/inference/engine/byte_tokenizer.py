"""A tokenizer of bytes with a plain chat template, for runs without a model (the scripted engine).

Ids 0 to 255 are bytes; 256 and 257 begin and end a turn. The class has only those methods of a Hugging Face tokenizer that
``services.common.text.chat`` calls.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

_BEGIN, _END = "<|im_start|>", "<|im_end|>"
_IDS = {_BEGIN: 256, _END: 257}
_SPECIAL = re.compile("|".join(map(re.escape, _IDS)))


class ByteTokenizer:
    """One token per byte."""

    chat_template = "bytes"
    eos_token_id = _IDS[_END]
    all_special_ids = list(_IDS.values())
    all_special_tokens = list(_IDS)

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = False, **_: Any
    ) -> str:
        text = "".join(f"{_BEGIN}{m['role']}\n{m['content']}{_END}" for m in messages)
        return f"{text}{_BEGIN}assistant\n" if add_generation_prompt else text

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        ids: list[int] = []
        position = 0
        for match in _SPECIAL.finditer(text):
            ids += text[position : match.start()].encode()
            ids.append(_IDS[match.group()])
            position = match.end()
        return ids + list(text[position:].encode())

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        names = {number: "" if skip_special_tokens else name for name, number in _IDS.items()}
        parts: list[bytes] = [
            names[i].encode() if i in names else bytes([i]) if i < 256 else b"?" for i in map(int, token_ids)
        ]
        return b"".join(parts).decode(errors="replace")
