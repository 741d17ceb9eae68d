"""Main loop of an engine's process: games by number, one request at a time, until the channel closes.

    owner -> process   {"kind": "open", "game", "settings"}    {"kind": "step", "game", "command"}    {"kind": "close", "game"}
    process -> owner   {"kind": "ready"} once, then one answer per request: {"kind": "ok", "answer"} or
                       {"kind": "refused" | "failed" | "raised", "error"}

    open             ->  {"feedback", "admissible", "objective", "max_score"}
    step "open door" ->  {"feedback", "admissible", "score", "won", "done"}

The owner keeps the deadlines. Refused is the request's fault, failed is the engine's, raised is a step's that the
engine did not understand (``DATA_ERRORS``): after either of the last two the game is gone.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping
from typing import Any

from services.common.system.child import die_with_parent_if_asked, limit_memory
from services.envgateway.envs.base import DATA_ERRORS, short_text
from services.envgateway.sandbox.bare import wire

Answer = Mapping[str, Any]


class RefusedError(Exception):
    """The game does not exist, or does not fit these settings."""


class LoadedGame:
    """A game of TextWorld's library, in which both engines play. Answers are plain data."""

    def __init__(self, engine: Any, close: Callable[[], object]) -> None:
        self.close = close
        self._engine = engine

    def start(self) -> Answer:
        state = self._engine.reset()
        about = {"objective": state.get("objective") or "", "max_score": float(state.get("max_score") or 0)}
        return {**_seen(state), **about}

    def step(self, command: str) -> Answer:
        state, _, done = self._engine.step(command)
        score, won = float(state.get("score") or 0), bool(state.get("won"))
        return {**_seen(state), "score": score, "won": won, "done": bool(done)}


def _seen(state: Any) -> Answer:
    """No command is listed for a game without its ``.json``."""
    return {"feedback": state.feedback.strip(), "admissible": list(state.get("admissible_commands") or ())}


def serve(descriptor: int, memory_bytes: int, load: Callable[[Mapping[str, Any]], LoadedGame]) -> None:
    """Answer until the owner closes the channel; ``load`` raises ``RefusedError`` for an unknown game."""
    die_with_parent_if_asked()
    limit_memory(memory_bytes)
    os.environ.pop("PYTHONPATH", None)  # the variable is for this interpreter only
    channel = socket.socket(fileno=descriptor)
    games = _Games(load)
    channel.sendall(wire.encode({"kind": "ready"}))
    frames = wire.FrameReader()
    while data := channel.recv(1 << 16):
        for request, _ in frames.feed(data):
            channel.sendall(wire.encode(games.answer(request)))


class _Games:
    def __init__(self, load: Callable[[Mapping[str, Any]], LoadedGame]) -> None:
        self._load = load
        self._games: dict[int, LoadedGame] = {}

    def answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        number = request["game"]
        try:
            match request["kind"]:
                case "open":
                    game = self._games[number] = self._load(request["settings"])
                    answer = game.start()
                case "step":
                    answer = self._games[number].step(request["command"])
                case _:
                    self._close(number)
                    answer = {}
        except RefusedError as error:
            return {"kind": "refused", "error": str(error)}
        except (Exception, SystemExit) as error:  # noqa: BLE001 - an engine raises any error, or exits: the owner gets an answer
            self._close(number)
            kind = "raised" if request["kind"] == "step" and isinstance(error, DATA_ERRORS) else "failed"
            return {"kind": kind, "error": short_text(error)}
        return {"kind": "ok", "answer": answer}

    def _close(self, number: int) -> None:
        if (game := self._games.pop(number, None)) is not None:
            game.close()
