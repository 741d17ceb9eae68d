"""Bodies of requests and answers of AgentBench's two protocols, for our client of its servers and our server for its
clients.

Requests are validated by the server. Answers are what our server writes; the client reads them from other servers too, so
every field may be missing there.
"""

from __future__ import annotations

from typing import Any, Literal, TypedDict

from pydantic import BaseModel, model_validator

Index = int | str  # of a sample

# -- a task-server adapter: one conversation is an episode, named by a uuid ------------------------------------------


class StartEpisode(BaseModel):
    sample_id: Index
    config: dict[str, Any] | None = None


class TextAction(BaseModel):
    type: str = "text"
    content: str


class StepEpisode(BaseModel):
    episode_id: str
    action: TextAction


class CancelEpisode(BaseModel):
    episode_id: str


class TaskInfo(TypedDict, total=False):
    name: str
    num_samples: int
    max_episode_length: int | None
    observation_type: str
    action_type: str
    description: str


class EpisodeObservation(TypedDict, total=False):
    type: str  # "messages" at the start, then "text"
    content: Any


class EpisodeInfo(TypedDict, total=False):
    turn: int
    status: str
    success: bool
    metrics: dict[str, float]


class EpisodeAnswer(TypedDict, total=False):
    episode_id: str
    observation: EpisodeObservation | None
    reward: float
    done: bool
    info: EpisodeInfo


# -- the classic controller: sessions by number ----------------------------------------------------------------------


class StartSample(BaseModel):
    name: str
    index: Index


class AgentResponse(BaseModel):
    status: Literal["normal", "cancelled", "agent context limit"] = "normal"
    content: str | None = None

    @model_validator(mode="after")
    def _has_content(self) -> AgentResponse:
        if self.status == "normal" and self.content is None:
            raise ValueError("If status is NORMAL, content should not be None")
        return self


class Interact(BaseModel):
    session_id: int
    agent_response: AgentResponse


class CancelSession(BaseModel):
    session_id: int


class SampleOutput(TypedDict, total=False):
    index: Index | None
    status: str
    result: Any
    history: list[dict[str, str]]


class SessionAnswer(TypedDict, total=False):
    session_id: int
    output: SampleOutput
