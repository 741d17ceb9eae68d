"""The replay engine: the torch engine emits the tokens of a request instead of sampling (teacher forcing).

Continuous batching, prefix caches and swaps between two steps are the torch engine's. So versions, segments and
log-probabilities equal those of sampling the same tokens, and a whole system can be tried without a trained model. A
request has its tokens in ``forced_ids``, one per decoding step, and ends at its first stop token, its budget, the context,
or the end of ``forced_ids``. Recipes select this engine with ``engine: forced``.

The log-probability of a token is taken under the request's sampling distribution. A token that top-k or top-p leaves
out could never have been drawn; such a token is added to the kept tokens: p(token) / (p(kept) + p(token)).
"""

from __future__ import annotations

from typing import ClassVar

from services.inference.engine.torch.engine import TorchEngine


class ReplayEngine(TorchEngine):
    """Emits ``forced_ids`` and refuses a request without them."""

    takes_forced_tokens: ClassVar[bool] = True
