"""The link, whose thread may change the commands at any moment."""

from __future__ import annotations

from services.trainer.link import GrpcLink, LoopThread
from tests.ports import free_port


class Arriving(GrpcLink):
    """A command for a checkpoint arrives right after the first look at it."""

    _looks = 0

    @property
    def _checkpoint_asked(self) -> bool:  # type: ignore[override]
        self._looks += 1
        return self._asked and self._looks > 1

    @_checkpoint_asked.setter
    def _checkpoint_asked(self, asked: bool) -> None:
        self._asked = asked or self._looks == 0


def test_a_command_for_a_checkpoint_that_arrives_as_the_loop_looks_is_taken_at_the_next_look() -> None:
    thread = LoopThread("test")
    link = Arriving(thread, f"127.0.0.1:{free_port()}", "r", "p")
    assert [link.take_checkpoint_command() for _ in range(3)] == [False, True, False]
    link.close()
    thread.stop()
