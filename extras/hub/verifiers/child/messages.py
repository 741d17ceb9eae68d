"""Messages between Rollmill and the process of a verifiers environment: one JSON object per line, both ways.

    to the process                                   from it
    {"ask": "open", "environment", "arguments"}      {"opened": {"version", "endless"}} | {"failed": {...}}
    {"ask": "tasks", "start", "count"}               {"tasks": [...]}  | {"failed": {...}}
    {"ask": "play", "id", "task", "base_url", ...}   {"id", "played": {"reward", "metrics"}} | {"id", "failed": {...}}
    {"ask": "cancel", "id"}                          {"id", "cancelled": true}

Imports the standard library only: two interpreters with different packages run this file.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field


class FailureKind(enum.StrEnum):
    """The party that can act on a failure."""

    NOT_INSTALLED = "not installed"  # install a package
    SETTINGS = "settings"  # correct the recipe
    ENVIRONMENT = "environment"  # its own code raised: the rollout fails without a reward
    INFRASTRUCTURE = "infrastructure"  # a peer or a machine failed: the rollout is played again


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    kind: FailureKind
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """The end of an episode. ``reward``: of its trained agents, their mean."""

    reward: float
    metrics: dict[str, float] = field(default_factory=dict)
