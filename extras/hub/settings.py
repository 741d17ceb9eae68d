"""Settings of the environments of other packages, sections of ``envgateway``."""

from __future__ import annotations

from typing import Any

from pydantic import Field, model_validator

from services.common.config.base import Section, ServerSection, Timeouts

PORT_MARK, PYTHON_MARK = "{port}", "{python}"  # in a command: a free port, the gateway's interpreter


class OpenEnvConfig(ServerSection, Timeouts):
    action: str | None = None
    """Field of the action that the policy's text becomes. Left out: the action's only required field, where it is text; else the
    text must be a JSON object, the whole action."""
    observation: str | None = None
    """Field of the observation that the policy reads. Left out: its only text, else all of it as JSON."""

    @model_validator(mode="after")
    def _told_its_port(self) -> OpenEnvConfig:
        if self.command and not any(PORT_MARK in part for part in self.command):
            raise ValueError(f"command has no {PORT_MARK}, in place of which the server is told its port")
        return self


class GymnasiumConfig(Section):
    """An environment of the package gymnasium."""

    id: str
    """Name in gymnasium's registry, such as `FrozenLake-v1`; `package.module:Name-v0` imports the module that registers it."""
    settings: dict[str, Any] = {}
    """Keyword arguments of `gymnasium.make`, such as `{is_slippery: false, max_episode_steps: 20}`."""
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
        if self.num_envs is not None and self.observation == "render":
            raise ValueError("observation is render, and a vector draws no text: write values, or an import path")
        return self


class HarborConfig(Section):
    """The environment that plays Harbor's task directories."""

    skip_run: bool = False
    """Play tasks whose Dockerfile has RUN, or which name an image, without these: the programs that they would bring are on the
    gateway's machine already, in /usr. Left at false, such tasks are left out and counted."""


class HubSections(Section):
    openenv: dict[str, OpenEnvConfig] = {}
    """Environments that OpenEnv servers play: name -> server."""
    gymnasium: dict[str, GymnasiumConfig] = {}
    """Environments of gymnasium's registry (extra `gymnasium`): name -> environment."""
    harbor: HarborConfig = HarborConfig()
    """The environment `harbor`, which plays task directories of `data.train.harbor`."""
