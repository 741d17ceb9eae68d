"""Judges ended server calls: the tokens to keep of a broken call, and whether the request needs another call."""

from __future__ import annotations

from services.common.errors import InfrastructureError, InvalidRequestError
from services.inference.engine.served.calls import Finish, VersionSpan
from services.inference.engine.served.request_state import CallOutput, RequestState
from services.inference.engine.served.server import Server


class Interrupted(Exception):
    """A server call that broke without a fault of the request."""


class NotFinite(InfrastructureError):
    """A failure that a retry under the same weights would repeat."""


class CertainTokens:
    """The tokens to keep of a broken call, whose server did not report the versions of the tokens.

    All tokens that came before the server's next switch were computed with its settled version.
    """

    def __init__(self, server: Server) -> None:
        self._server = server
        self._switches = server.switches
        # A call with an adapter has its version to the end.
        self._is_fixed = bool(server.adapter)
        self._version = server.version if self._is_fixed else server.settled_version
        self._certain: int | None = None if self._version is not None else 0

    @property
    def of_adapter(self) -> int | None:
        """The version of all tokens of a call with an adapter; None for another call."""
        return self._version if self._is_fixed else None

    @property
    def is_outdated(self) -> bool:
        """Whether the server has switched since the call's begin."""
        return self._server.switches != self._switches

    def note(self, num_tokens: int) -> None:
        """Note the number of tokens before the current chunk."""
        if self._certain is None and not self._is_fixed and self.is_outdated:
            self._certain = num_tokens

    def take(self, output: CallOutput, state: RequestState, *, mixed: bool) -> None:
        """Keep these tokens. ``InfrastructureError`` if a watch has seen tokens beyond them."""
        output.cut_off()
        if self._certain is not None:
            if output.cut is not None and self._certain < output.cut:
                raise InfrastructureError(
                    "the server did not report the weight version of tokens that were already watched"
                )
            output.keep_first(self._certain)
        if output.tokens:
            assert self._version is not None
            span = VersionSpan(version=self._version, start=0, end=len(output.tokens))
            state.take(output, (span,), mixed_from=0 if mixed else None)


def judge(finish: Finish, output: CallOutput, state: RequestState) -> None:
    """Judge a completed call: returns if the tokens count, else raises ``Interrupted`` (another call is needed) or an error."""
    if finish.kind == "abort":
        if finish.status is not None and 400 <= finish.status < 500:
            raise InvalidRequestError(
                f"request {state.request.request_id!r}: the server refuses the request: {finish.message}"
            )
        raise Interrupted(finish.message or "the server ended the call")
    if not output.tokens:
        raise InfrastructureError(
            f"request {state.request.request_id!r}: no room for another token after {len(state.sequence)}: the KV cache "
            "of the server is smaller than policies.<name>.model.context_length; give the server more memory"
        )
