"""Interface of an AgentBench server for both protocols, and the conversion of answers to our records.

A turn that the server did not take raises ``InfrastructureError`` and may be repeated. A turn that the server may have
taken, and a session that the server has lost, raise ``EpisodeLostError``. A task failure that AgentBench reports is
never a reward. An action that the server refuses to read is the policy's fault: the episode ends as an invalid action.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from services.envgateway.envs.agentbench.messages import Index
from services.envgateway.envs.base import EndStatus, EpisodeLostError

Session = int | str


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """A session has begun."""

    session: Session
    messages: Sequence[Mapping[str, str]]  # role (user, assistant) and content; the last is the first turn


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """The server's answer to a turn. The server forgets a session that is done."""

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
        """End a session early. Failures are logged: the server collects sessions that remain."""
        ...


class ContentRefusedError(EpisodeLostError):
    """The server refuses the content: the action is at fault. The session is over for us."""


CONTENT_REFUSED = (413, 422)  # too large: an answer outside of the protocol
_MOST_CHARS = 100_000  # of an action: far above any reply, far below the limits of servers


def sendable(action: str) -> str:
    """The action in a form that every server reads: no lone surrogates, no NUL, bounded length."""
    return action[:_MOST_CHARS].encode(errors="replace").decode().replace("\0", "\ufffd")


_ROLES = {"agent": "assistant"}


def chat(history: Any) -> list[dict[str, str]]:
    """AgentBench's history with the usual roles. Raises ``EpisodeLostError`` for any other value."""
    if not isinstance(history, list) or not history:
        raise EpisodeLostError(f"the server showed no conversation, but {history!r:.80}")
    try:
        return [{"role": _ROLES.get(m["role"], m["role"]), "content": str(m["content"])} for m in history]
    except (KeyError, TypeError) as error:
        raise EpisodeLostError(f"the server showed a conversation without roles: {error!r}") from error


def end_status(told: object) -> EndStatus:
    """``completed`` or ``SampleStatus.COMPLETED``. Raises ``EpisodeLostError`` for an end that the agent did not cause."""
    word = str(told).removeprefix("SampleStatus.").replace("_", " ").lower()
    try:
        return EndStatus(word)
    except ValueError:
        raise EpisodeLostError(f"the server ended the session with status {word!r}") from None


def reward_of(result: object, status: EndStatus) -> float:
    """The reward in a task's return value: ``result``, else ``reward``, or the number itself.

    A missing reward is 0 where the agent failed; a completed task without a reward raises ``EpisodeLostError``.
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
