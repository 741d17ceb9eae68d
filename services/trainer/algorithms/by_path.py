"""Loads a user's own loss by import path: ``name: my_losses:clipped``.

The function gets the public ``TokenBatch`` and the mapping ``algorithm.settings``, and returns a ``PolicyLoss``. Only the
trainer imports the function; the training step checks the result.
"""

from __future__ import annotations

from services.common.config.training.losses import LOSS, LossByPath
from services.common.importing import load_object
from services.common.user_code import check_call
from services.trainer.algorithms.base import LossFunction, PolicyLoss, TokenBatch


def loss_by_path(path: str) -> LossFunction:
    """The function at ``path``, with the signature of Rollmill's own losses.

    Raises:
        ConfigError: the module or the name cannot be found, or the object is not callable.
    """
    function = load_object(path)
    check_call(function, f"algorithm.name: {path}", LOSS, "tokens", "settings")

    def loss(tokens: TokenBatch, config: LossByPath) -> PolicyLoss:
        try:
            result: PolicyLoss = function(tokens, config.settings)
        except SystemExit as error:  # the rank would leave as at the end of a run
            raise RuntimeError(f"algorithm.name: {path} raised SystemExit: {error}") from error
        return result

    return loss
