"""The link of the training thread to the client, whose thread may change the commands at any moment."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from services.trainer.link import GrpcLink


class Arriving:
    """Commands of which one arrives right after the first look at it."""

    def __init__(self) -> None:
        self._asked = self._has_arrived = False

    @property
    def checkpoint(self) -> bool:
        seen = self._asked
        if not self._has_arrived:
            self._asked = self._has_arrived = True
        return seen

    @checkpoint.setter
    def checkpoint(self, asked: bool) -> None:
        self._asked = asked


def test_a_command_for_a_checkpoint_that_arrives_as_the_loop_looks_is_taken_at_the_next_look() -> None:
    nothing: Any = None
    client: Any = SimpleNamespace(commands=Arriving())
    link = GrpcLink(client, nothing, rank=0)
    assert [link.take_checkpoint_command() for _ in range(3)] == [False, True, False]
