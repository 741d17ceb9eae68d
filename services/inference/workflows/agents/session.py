"""Plays a rollout through a session of the endpoint: settings, the block in which the session is served, the outcome."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from typing import TypeVar

from pydantic import Field

from services.common.config.base import Section
from services.common.config.recipe import Recipe
from services.common.errors import ConfigError
from services.inference.workflows.agents.captured import CapturedSession, Rewrites
from services.inference.workflows.base import Outcome, WorkflowContext

Given = TypeVar("Given")


class SessionSettings(Section):
    policy: str | None = None
    """The policy behind the model `default`; left out, the only policy of the recipe."""
    rewrites: Rewrites = "new_sequence"
    """A request that does not extend an earlier one, word for word, begins another sequence of the trajectory, or is
    refused."""
    client_sampling: bool = False
    """Whether temperature, top_p, top_k, min_p and seed of requests count, instead of the recipe's `sampling`. Each turn is then
    trained at the temperature and over the tokens of its sampling; temperature 0 is refused, except in evaluation."""
    max_sequences: int = Field(default=64, ge=1)
    """Most sequences of one trajectory; a request that would begin another is refused."""
    thinking: bool | None = None
    """Turn the thinking of the chat template on or off, if supported (Qwen3); left out, the template's default."""


def check_endpoint(recipe: Recipe, who: str) -> None:
    """Check that a recipe's replicas have an endpoint; ``ConfigError`` names the remedy."""
    for name, service in recipe.inference.items():
        if service.endpoint.port is None:
            raise ConfigError(
                f"inference.{name}.endpoint.port is null, and {who} reach the policies "
                "through the endpoint: write a port there, or 0 for a free one"
            )


async def in_session(
    settings: SessionSettings, context: WorkflowContext, play: Callable[[str, str], Awaitable[Given]]
) -> tuple[CapturedSession, Given]:
    """The result of ``play(base_url, session id)``, and the session with the tokens that its requests sampled.

    Raises the infrastructure failure of the session's requests if there is one; else the errors of ``play``.
    """
    if context.endpoint is None:
        raise ConfigError("this workflow needs the endpoint: write a port at inference.<name>.endpoint.port")
    session = CapturedSession(
        context.policies,
        context.sampling,
        default_policy=settings.policy,
        rewrites=settings.rewrites,
        client_sampling=settings.client_sampling,
        max_sequences=settings.max_sequences,
        thinking=settings.thinking,
        purpose=context.purpose,
    )
    try:
        with context.endpoint.opened(session) as session_id:
            given = await play(context.endpoint.base_url, session_id)
    except Exception:  # an infrastructure failure explains the agent's error
        if session.failure is not None:
            raise session.failure from None
        raise
    if session.failure is not None:
        raise session.failure
    return session, given


def captured_outcome(session: CapturedSession, reward: float, metrics: Mapping[str, float]) -> Outcome:
    """The record of a rollout with its reward, its metrics, and how many sequences came from others."""
    sequences = session.sequences(reward)
    origins = Counter(f"sequences_{each.origin}" for each in sequences if each.parent is not None)
    counted = {name: float(count) for name, count in origins.items()}
    return Outcome(sequences=sequences, reward=reward, metrics={**metrics, **counted})
