"""What an episode needs of a server, whichever protocol it speaks; and how the server's words become ours.

A turn that the server did not take raises ``InfrastructureError`` and may be repeated. A turn of which nobody knows whether
it was taken, and a session that the server has lost, raise ``EpisodeLostError``. What AgentBench itself reports as the
failure of a task is never a reward. An action that the server refuses to read is the policy's: it ends the episode as an
invalid action.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from services.envgateway.envs.base import EndStatus, EpisodeLostError

Index = int | str
Session = int | str


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """A session has begun."""

    session: Session
    messages: Sequence[Mapping[str, str]]  # role (user, assistant) and content; the last is the first turn


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """What the server answered to a turn. A session that is done is forgotten there."""

    text: str = ""
    done: bool = False
    reward: float = 0.0
    status: str = ""


class AgentBenchServer(Protocol):
    async def indices(self) -> Sequence[Index]: ...

    async def start(self, index: Index) -> Opening:
        """Raises ``CapacityError`` when there is no place, ``InvalidRequestError`` for an index that is none."""
        ...

    async def interact(self, session: Session, content: str) -> Turn: ...

    async def cancel(self, session: Session) -> None:
        """End a session early. What goes wrong is logged: the server collects what is left."""
        ...


class ContentRefusedError(EpisodeLostError):
    """The server reads no such content: the action's doing, whatever it is. Its session is over for us."""


CONTENT_REFUSED = (413, 422)  # too large; not what the protocol has
_MOST_CHARS = 100_000  # of an action: far above any reply, far below what servers take


def sendable(action: str) -> str:
    """An action as every server reads it: without lone surrogates and NUL, and no longer than one can be."""
    return action[:_MOST_CHARS].encode(errors="replace").decode().replace("\0", "\ufffd")


_ROLES = {"agent": "assistant"}


def chat(history: Any) -> list[dict[str, str]]:
    """AgentBench's history with the usual roles. Raises ``EpisodeLostError`` when it is none."""
    if not isinstance(history, list) or not history:
        raise EpisodeLostError(f"the server showed no conversation, but {history!r:.80}")
    try:
        return [{"role": _ROLES.get(m["role"], m["role"]), "content": str(m["content"])} for m in history]
    except (KeyError, TypeError) as error:
        raise EpisodeLostError(f"the server showed a conversation without roles: {error!r}") from error


def end_status(told: object) -> EndStatus:
    """``completed`` or ``SampleStatus.COMPLETED``. Raises ``EpisodeLostError`` for what is no end of the agent's making."""
    word = str(told).removeprefix("SampleStatus.").replace("_", " ").lower()
    try:
        return EndStatus(word)
    except ValueError:
        raise EpisodeLostError(f"the server ended the session with status {word!r}") from None


def reward_of(result: object, status: EndStatus) -> float:
    """``result``, else ``reward``, of what a task returned, or the number itself.

    Nothing of the kind is 0 where the agent failed; a completed task without a reward raises ``EpisodeLostError``.
    """
    value = result
    if isinstance(result, Mapping):
        value = result.get("result")
        if value is None:
            value = result.get("reward")
    if isinstance(value, bool | int | float):
        return float(value)
    if value is None and status is not EndStatus.COMPLETED:
        return 0.0
    raise EpisodeLostError(f"the task was completed with a result that holds no reward: {result!r:.120}")
