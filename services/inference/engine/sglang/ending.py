"""How legs end: what is certain of one that broke, and whether one that ended by itself is to be played on.

Pure judgement; the engine acts on it.
"""

from __future__ import annotations

from services.common.errors import InfrastructureError, InvalidRequestError
from services.inference.engine.sglang.legs import Finish, VersionSpan
from services.inference.engine.sglang.playing import Leg, Playing
from services.inference.engine.sglang.server import Server


class Interrupted(Exception):
    """A leg that a server could not bring to an end, through no fault of the request."""


class NotFinite(InfrastructureError):
    """Trying again under the same weights would not help."""


class Before:
    """What is certain of a leg whose server never said which weights computed it.

    Whatever came before the server began its next switch was computed with the version that it had settled on.
    """

    def __init__(self, server: Server) -> None:
        self._server = server
        self._version = server.settled_version
        self._switches = server.switches
        self._certain: int | None = None if self._version is not None else 0

    def note(self, num_tokens: int) -> None:
        """So many had come before the chunk that comes now."""
        if self._certain is None and self._server.switches != self._switches:
            self._certain = num_tokens

    def take(self, leg: Leg, playing: Playing, *, mixed: bool) -> None:
        """``InfrastructureError`` when what somebody has watched is not among it."""
        leg.cut_off()
        if self._certain is not None:
            if leg.cut is not None and self._certain < leg.cut:
                raise InfrastructureError("the server did not say which weights computed what was watched")
            leg.keep_first(self._certain)
        if leg.tokens:
            assert self._version is not None
            span = VersionSpan(version=self._version, start=0, end=len(leg.tokens))
            playing.take(leg, (span,), mixed_from=0 if mixed else None)


def judge(finish: Finish, leg: Leg, playing: Playing) -> None:
    """A leg that ended by itself: fine, or to be played on elsewhere (``Interrupted``), or hopeless."""
    if finish.kind == "abort":
        if finish.status is not None and 400 <= finish.status < 500:
            raise InvalidRequestError(f"request {playing.request.request_id!r}: SGLang refuses it: {finish.message}")
        raise Interrupted(finish.message or "the server ended it")
    if not leg.tokens:
        raise InfrastructureError(
            f"request {playing.request.request_id!r}: no room for another token after {len(playing.sequence)}: the KV cache "
            "of the SGLang server is smaller than policies.<name>.model.context_length; give it more memory"
        )
