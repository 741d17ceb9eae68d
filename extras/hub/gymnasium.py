"""Environments of gymnasium's registry, alone and as vectors; one is made for each episode.

An exception of an environment is a failure of the environment and never a reward: an action that cannot be read never
reaches it.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from extras.hub.settings import GymnasiumConfig
from services.common.errors import ConfigError, InvalidRequestError, UserError
from services.common.importing import load_object
from services.common.installing import install
from services.envgateway.envs.base import EndStatus, Observation, StepResult
from services.envgateway.envs.gymnasium import ActionReader

MISSING = f"the package gymnasium is not installed here: {install('gymnasium')}"
_SEEDS = 2**31


def make_world(name: str, config: GymnasiumConfig) -> GymnasiumWorld | str:
    return MISSING if importlib.util.find_spec("gymnasium") is None else GymnasiumWorld(name, config)


class GymnasiumWorld:
    """Builds the episodes of one entry of the recipe."""

    is_remote = True  # its errors are the environment's, not the action's

    def __init__(self, name: str, config: GymnasiumConfig) -> None:
        self._where = f"envgateway.gymnasium.{name}"
        self._config = config

    def build(self) -> GymnasiumEpisode:
        return GymnasiumEpisode(self._config, self._where)

    def problem(self) -> str | None:
        """The reason for which no episode can begin; None where one does."""
        episode = self.build()
        try:
            episode.reset({}, 0)
        except UserError as error:
            return error.message
        finally:
            episode.close()
        return None

    async def close(self) -> None:
        pass


class GymnasiumEpisode:
    """One environment, or with ``num_envs`` copies that play in one conversation. The methods are plain: the gateway runs
    them in a thread.

    A copy leaves the conversation when its episode ends; results of the vector for this copy, such as those of a new start,
    do not count.
    """

    def __init__(self, config: GymnasiumConfig, where: str) -> None:
        self._config, self._where = config, where
        self._is_vector, self._number = config.num_envs is not None, config.num_envs or 1
        self._env: Any = None
        self._read: Callable[[str], Any] = lambda reply: None  # None: no action
        self._told = ""
        self._shown: Callable[[Any], str] = text_of
        self._playing = list(range(self._number))
        self._invalid = 0
        self._return, self._length = 0.0, 0  # sums over the copies

    def reset(self, task: Mapping[str, Any], seed: int) -> Observation:
        """Begin. Raises ``InvalidRequestError`` for what the recipe says wrong."""
        import gymnasium

        config = self._config
        options = task.get("options")
        extras = {"render_mode": "ansi"} if config.observation == "render" else {}
        try:
            if self._is_vector:
                self._env = gymnasium.make_vec(config.id, self._number, **extras, **config.settings)
            else:
                self._env = gymnasium.make(config.id, **extras, **config.settings)
            self._read, self._told = self._reader()
            if ":" in config.observation:
                self._shown = load_object(config.observation)
            observation, _ = self._env.reset(seed=seed % _SEEDS, options=dict(options) if options else None)
        except (gymnasium.error.Error, ModuleNotFoundError, TypeError) as error:
            raise InvalidRequestError(f"{self._where}: {config.id} cannot be made: {error}") from error
        except ConfigError as error:
            raise InvalidRequestError(error.message) from error
        text, instruction = self._text(observation), config.instruction.strip()
        return Observation(text=f"{instruction}\n\n{text}" if instruction else text)

    def step(self, action: str) -> StepResult:
        if self._is_vector:
            chosen = actions_of_copies(action, self._playing, self._read)
        else:
            read = self._read(action)
            chosen = None if read is None else {0: read}
        if chosen is None:
            self._invalid += 1
            return StepResult(observation=self._how(), metrics={"invalid_actions": float(self._invalid)})
        if self._is_vector:
            import numpy as np

            idle = chosen[self._playing[0]]  # for copies that have ended: ignored
            observation, rewards, terminated, truncated, _ = self._env.step(
                np.asarray([chosen.get(copy, idle) for copy in range(self._number)])
            )
        else:
            observation, *each, _ = self._env.step(chosen[0])
            rewards, terminated, truncated = ([one] for one in each)
        paid = sum(float(rewards[copy]) for copy in self._playing)
        self._return += paid
        self._length += len(self._playing)
        is_won = any(terminated[copy] for copy in self._playing)
        self._playing = [copy for copy in self._playing if not (terminated[copy] or truncated[copy])]
        done = not self._playing
        metrics = {
            "episode_return": self._return / self._number,
            "episode_length": self._length / self._number,
            "invalid_actions": float(self._invalid),
        }
        if self._is_vector:
            metrics["copies_playing"] = float(len(self._playing))
        return StepResult(
            observation=self._text(observation),
            reward=paid / self._number,
            done=done,
            status=(EndStatus.COMPLETED if is_won else EndStatus.TURN_LIMIT) if done else "",
            metrics=metrics,
        )

    def close(self) -> None:
        env, self._env = self._env, None
        if env is not None:
            env.close()

    def _reader(self) -> tuple[Callable[[str], Any], str]:
        import gymnasium

        actions = self._config.actions
        if isinstance(actions, str):
            return load_object(actions), "an action of this environment"
        space = self._env.single_action_space if self._is_vector else self._env.action_space
        if not isinstance(space, gymnasium.spaces.Discrete):
            raise ConfigError(
                f"{self._where}: the actions of {self._config.id} are {space}, which have no names: write actions: "
                "package.module:function, a function of the reply"
            )
        reader = ActionReader(int(space.start), int(space.n), actions, self._where)
        return reader, reader.told

    def _how(self) -> str:
        if not self._is_vector:
            return f"The action must be {self._told}."
        lines = ", ".join(str(copy + 1) for copy in self._playing)
        return f"Write a line for each of {lines}, such as `{self._playing[0] + 1}: ACTION`; an action is {self._told}."

    def _text(self, observation: Any) -> str:
        if self._is_vector:
            from gymnasium.vector.utils import iterate

            each = list(iterate(self._env.observation_space, observation))
            return "\n".join(f"{copy + 1}: {self._shown(each[copy])}" for copy in self._playing)
        return drawing(self._env.render()) if self._config.observation == "render" else self._shown(observation)


_MARKED = re.compile(r"\x1b\[[0-9;]+m(.*?)\x1b\[0?m", re.DOTALL)
_CODES = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_LINE_OF_COPY = re.compile(r"^[^\S\n]*+(\d{1,6})\s*+[:.)]\s*+(.*)$", re.MULTILINE)


def text_of(observation: Any) -> str:
    """An observation in plain text: numbers with four significant digits, parts of a mapping or tuple in lines of their own.

    >>> text_of({"place": (1, 2), "speed": 0.123456})
    'place: 1, 2\\nspeed: 0.1235'
    """
    if isinstance(observation, Mapping):
        return "\n".join(f"{key}: {_in_line(value)}" for key, value in observation.items())
    if isinstance(observation, (tuple, list)) and any(isinstance(part, (Mapping, tuple, list)) for part in observation):
        return "\n".join(map(text_of, observation))
    return _in_line(observation)


def drawing(rendered: Any) -> str:
    """What ``render`` drew in text; a text that is marked by colour alone is put in brackets.

    >>> drawing("\\x1b[41mS\\x1b[0mFF")
    '[S]FF'
    """
    if not isinstance(rendered, str):
        raise ConfigError(f"the environment draws a {type(rendered).__name__} and no text: write observation: values")
    return _CODES.sub("", _MARKED.sub(r"[\1]", rendered)).strip("\n")


def _in_line(value: Any) -> str:
    if hasattr(value, "tolist"):  # of numpy
        value = value.tolist()
    if isinstance(value, (list, tuple)):
        return (" " if isinstance(value, list) else ", ").join(map(_in_line, value))
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value)


def actions_of_copies(reply: str, copies: Sequence[int], read: Callable[[str], Any]) -> dict[int, Any] | None:
    """The actions in lines ``1: left``, by copy from 0, of the copies that still play; None where one lacks.

    >>> actions_of_copies("1: up\\n3: down", [0, 2], str.strip)
    {0: 'up', 2: 'down'}
    """
    found = {int(number) - 1: read(rest) for number, rest in _LINE_OF_COPY.findall(reply)}
    chosen = {copy: found.get(copy) for copy in copies}
    return None if any(action is None for action in chosen.values()) else chosen
