"""Whether a generation request makes sense, asked before any engine touches it.

Knows the context and vocabulary of an engine, nothing of how it generates.
"""

from __future__ import annotations

from services.common.errors import InvalidRequestError, PromptTooLongError
from services.inference.engine.base import GenerationRequest


def check_request(request: GenerationRequest, *, context_length: int, vocab_size: int | None = None) -> None:
    """``PromptTooLongError`` or ``InvalidRequestError`` with the value that is wrong; no vocabulary, no id check."""
    num_prompt = len(request.prompt_ids)
    sampling = request.sampling
    if num_prompt >= context_length:
        raise PromptTooLongError(
            f"prompt has {num_prompt} tokens, the context only {context_length} and at least one must be new",
            prompt_tokens=str(num_prompt),
            context_tokens=str(context_length),
        )
    problem = ""
    if not num_prompt:
        problem = "the prompt is empty"
    elif vocab_size is not None and not 0 <= min(request.prompt_ids) <= max(request.prompt_ids) < vocab_size:
        problem = f"the prompt has token ids outside 0…{vocab_size - 1}"
    elif vocab_size is not None and any(not 0 <= token < vocab_size for token in request.stop_token_ids):
        problem = f"stop tokens {request.stop_token_ids} reach outside 0…{vocab_size - 1}"
    elif sampling.max_new_tokens < 1:
        problem = f"max_new_tokens is {sampling.max_new_tokens}; it must be at least 1"
    elif sampling.min_new_tokens < 0:
        problem = f"min_new_tokens is {sampling.min_new_tokens}; it must be 0 or more"
    elif not sampling.temperature >= 0:  # written so that NaN is refused too
        problem = f"temperature is {sampling.temperature}; it must be 0 (greedy) or more"
    elif not 0 < sampling.top_p <= 1:
        problem = f"top_p is {sampling.top_p}; it must be above 0 and at most 1"
    elif sampling.top_k < 0:
        problem = f"top_k is {sampling.top_k}; it must be 0 (off) or more"
    if problem:
        raise InvalidRequestError(f"request {request.request_id!r}: {problem}")
