"""Base class of the environments that users write: one object per episode.

class Guess(rollmill.Environment):
    def reset(self, task, seed):
        return rollmill.Observation(text="Guess a number from 1 to 100.")

    def step(self, action):
        return rollmill.StepResult(reward=1.0, done=True)
"""

from __future__ import annotations

from services.envgateway.envs.base import EnvironmentContext


class Environment:
    """A subclass writes ``reset(self, task, seed) -> Observation`` and ``step(self, action) -> StepResult``, plain or async.

    ``InfrastructureError`` from ``step`` means that the turn did not happen and may be repeated. Any exception that is not one of
    Rollmill's ends the episode as an infrastructure failure, which is never a reward.
    """

    def __init__(self, context: EnvironmentContext) -> None:
        """``context`` has the gateway's rewards and tools."""
        self.context = context

    def close(self) -> None:
        """Release the episode's resources; called once."""
