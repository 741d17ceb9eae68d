"""The torch engine over tokens that somebody else chose: teacher forcing, one token per decoding step.

Everything but the choice of the token is the torch engine's: continuous batching, prefix caches, swaps between two
steps. So versions, segments and log-probabilities are those that sampling the same tokens would have left, and a
whole system can be tried without a trained model. What a request is to say stands in ``forced_ids``; it ends at its
first stop token, its budget, the context, or the end of ``forced_ids``.

The log-probability of a token is taken under the request's sampling distribution. A token that top-k or top-p leaves
out could never have been drawn: it is kept beside those that are, p(token) / (p(kept) + p(token)).
"""

from __future__ import annotations

from typing import ClassVar

from services.inference.engine.torch_engine import TorchEngine


class ForcedEngine(TorchEngine):
    """Refuses a request without ``forced_ids``: it draws nothing."""

    takes_forced_tokens: ClassVar[bool] = True
