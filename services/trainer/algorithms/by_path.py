"""A loss of the user's own, named by import path: ``name: my_losses:clipped``.

The function gets the public ``TokenBatch`` and the mapping ``algorithm.settings``, and gives a ``PolicyLoss``. The trainer alone
imports it; the step checks what it returns.
"""

from __future__ import annotations

from services.common.config.losses import LossByPath
from services.common.errors import ConfigError
from services.common.importing import load_object
from services.trainer.algorithms.base import LossFunction, PolicyLoss, TokenBatch


def loss_by_path(path: str) -> LossFunction:
    """The function behind ``path``, called as Millrace's own losses are.

    Raises:
        ConfigError: the module or the name cannot be found, or it is not callable.
    """
    function = load_object(path)
    if not callable(function):
        raise ConfigError(f"algorithm.name: {path} is of type {type(function).__name__}, and no function")

    def loss(tokens: TokenBatch, config: LossByPath) -> PolicyLoss:
        result: PolicyLoss = function(tokens, config.settings)
        return result

    return loss
