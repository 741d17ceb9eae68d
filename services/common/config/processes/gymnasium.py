"""Settings of the environments of the package gymnasium."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from services.common.config.base import Section


class GymnasiumConfig(Section):
    id: str
    """Name in gymnasium's registry, such as `FrozenLake-v1`; `package.module:Name-v0` imports the module that registers it."""
    settings: dict[str, Any] = {}
    """Keyword arguments of `gymnasium.make`, such as `{is_slippery: false}`."""
    instruction: str = ""
    """Text before the first observation: the rules, and what to answer."""
    observation: str = "values"
    """How an observation becomes text: `values` (numbers, one part in a line), `render` (what `render_mode: ansi` draws), or
    the import path of a function `observation -> text`."""
    actions: list[str] | str = []
    """How a reply becomes an action of a discrete space: names in the order of the actions, of which the last one in the reply
    counts; or the import path of a function `reply -> action` (None where there is none). Left out, the last whole number."""
    num_envs: int | None = Field(default=None, ge=1)
    """Play so many copies in one episode, as `gymnasium.make_vec` makes them: the reply has an action for each, in lines `1:
    left`. The reward is the mean of their returns. Left out, one environment without a vector."""
    vectorization: Literal["sync", "async", "vector_entry_point"] | None = None
    """With `num_envs`: gymnasium's way; left out, the environment's own."""
    max_turns: int | None = Field(default=None, ge=1)
    """Turns of an episode (`max_episode_steps`); left out, those of the registry, and those of the workflow."""

    @model_validator(mode="after")
    def _can_be_read(self) -> GymnasiumConfig:
        if isinstance(self.actions, str) and ":" not in self.actions:
            raise ValueError(
                f"actions is {self.actions!r}: write a list of names, or an import path (package.module:function)"
            )
        if isinstance(self.actions, list):
            lowered = [name.strip().lower() for name in self.actions]
            if "" in lowered or len(set(lowered)) < len(lowered):
                raise ValueError(f"actions are {self.actions}: each needs a name of its own, without regard to case")
        if self.observation not in ("values", "render") and ":" not in self.observation:
            raise ValueError(
                f"observation is {self.observation!r}: write values, render, or an import path (package.module:function)"
            )
        if self.vectorization is not None and self.num_envs is None:
            raise ValueError("vectorization is set, and num_envs is not: write num_envs, or leave vectorization out")
        if self.num_envs is not None and self.observation == "render":
            raise ValueError("observation is render, and a vector draws no text: write values, or an import path")
        return self
