"""The command line's view of the orchestrator: synchronous, one call each, explicit deadlines.

A command finds a run in progress by the run's directory, which has address and keys, or by an address and ROLLMILL_KEYS.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import typer

from services.cli.inspect.run_state import check_run_directory, why_silent
from services.cli.inspect.standing import newest_run
from services.cli.keys import keys_there, operate
from services.cli.plan import orchestrator_address
from services.common.config.reading.loading import load_resolved
from services.common.errors import AccessError, ConfigError, InfrastructureError, NotFoundError, RollmillError
from services.common.net.hosts import ORCHESTRATOR, check_place, is_known
from services.common.pb import run_pb2, run_pb2_grpc
from services.common.rpc.credentials import sync_channel
from services.common.rpc.statuses import from_call
from services.common.security import identity
from services.common.security.bundle import VARIABLE
from services.common.security.handshake import refusal_now
from services.common.security.roles import Peer

CALL_DEADLINE_S = 5.0


class OrchestratorClient:
    """Raises ``InfrastructureError`` with the address when the orchestrator does not answer, ``AccessError`` for wrong
    keys.

    ``why_silent`` gives a likely reason and the remedy when no process listens there.
    """

    def __init__(self, address: str, why_silent: Callable[[], str] = lambda: "is the run still going?") -> None:
        self.address = address
        self._why_silent = why_silent
        self._connect()

    def _connect(self) -> None:
        self._channel = sync_channel(self.address, Peer.ORCHESTRATOR)
        self._run = run_pb2_grpc.RunServiceStub(self._channel)

    def reconnect(self) -> None:
        """Connect again with the present identity of this process: its keys have changed."""
        self._channel.close()
        self._connect()

    def close(self) -> None:
        self._channel.close()

    def get_run(self) -> run_pb2.GetRunResponse:
        with self._translated():
            return self._run.GetRun(run_pb2.GetRunRequest(), timeout=CALL_DEADLINE_S)

    def pause(self) -> None:
        with self._translated():
            self._run.PauseRun(run_pb2.PauseRunRequest(), timeout=CALL_DEADLINE_S)

    def resume(self) -> None:
        with self._translated():
            self._run.ResumeRun(run_pb2.ResumeRunRequest(), timeout=CALL_DEADLINE_S)

    def stop(self, reason: str) -> None:
        with self._translated():
            self._run.StopRun(run_pb2.StopRunRequest(reason=reason), timeout=CALL_DEADLINE_S)

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except grpc.RpcError as error:
            raise self._translate(error) from None

    def _translate(self, error: grpc.RpcError) -> RollmillError:
        address = self.address
        told = from_call(error, address)
        if isinstance(told, AccessError):
            return told
        code = error.code() if isinstance(error, grpc.Call) else grpc.StatusCode.UNKNOWN
        detail = (error.details() if isinstance(error, grpc.Call) else "") or str(error)
        is_silent = code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
        if is_silent and (refused := refusal_now(address, identity.current(), Peer.ORCHESTRATOR)) is not None:
            return refused
        if code is grpc.StatusCode.UNAVAILABLE and not is_known(address):
            return InfrastructureError(
                f"this machine cannot resolve the host of {address}: write a name or address that it can"
            )
        if code is grpc.StatusCode.UNAVAILABLE:
            return InfrastructureError(f"no answer from {address}: {self._why_silent()}")
        if code is grpc.StatusCode.DEADLINE_EXCEEDED:
            return InfrastructureError(f"{address} did not answer within {CALL_DEADLINE_S:g} s")
        if code is grpc.StatusCode.NOT_FOUND:
            return NotFoundError(detail)
        return InfrastructureError(f"{address}: {detail}")


NAME_IT = "name the run's directory (runs/NAME), or another address with --orchestrator"


def chosen(run: Path | None, address: str | None) -> Path | None:
    """The run that a command is for: the one named, else the newest below `runs`, which stderr then names; None where an
    address is given, or there is no run and the default address counts."""
    if run is not None or address is not None or (newest := newest_run()) is None:
        return run
    typer.echo(f"run: {newest} (the newest)", err=True)
    return newest


def check_answers(client: OrchestratorClient, run: Path) -> run_pb2.GetRunResponse:
    """The state of ``run`` by its orchestrator.

    Raises:
        InfrastructureError: it does not answer, or another run has its port.
    """
    answer = client.get_run()
    if answer.run_id != load_resolved(run).run.id:
        raise InfrastructureError(f"at {client.address} another run answers ({answer.run_id}): {why_silent(run)}")
    return answer


def reach(run: Path | None, address: str | None) -> OrchestratorClient:
    """The orchestrator of ``run``, with that run's keys, if any; without ``run`` the one at ``address``.

    Raises ``ConfigError`` for both at once, no run directory or address, and for keys that cannot be used.
    """
    if run is None:
        place = address or ORCHESTRATOR
        check_place(place)
        given = os.environ.get(VARIABLE)
        operate(Path(given) if given else None)
        why = (
            NAME_IT if address else f"{Path('runs').absolute()} has no run, and this is the default address; {NAME_IT}"
        )
        return OrchestratorClient(place, lambda: why)
    if address is not None:
        raise ConfigError("name the run's directory or --orchestrator HOST:PORT, not both")
    check_run_directory(run)
    recipe = load_resolved(run)
    keys = keys_there(recipe, run)
    if keys is None and recipe.needs_keys:
        raise ConfigError(
            f"{run} does not have the keys of its run: set {VARIABLE} to the directory it was started with"
        )
    operate(keys)
    return OrchestratorClient(orchestrator_address(recipe), lambda: why_silent(run))
