"""The ports that tests give to their servers."""

from __future__ import annotations

import pytest

from services.common.system import machine as services_ports
from tests.ports import free_port


def test_every_call_gives_another_port_out_of_the_kernels_and_the_services_reach() -> None:
    ports = [free_port() for _ in range(30)]
    assert len(set(ports)) == 30
    assert max(ports) < services_ports._begin_of_ephemeral() - services_ports._WIDTH
    assert all(services_ports.is_free(port) for port in ports)


def test_two_workers_of_one_run_get_different_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTEST_XDIST_TESTRUNUID", "a run")
    found = []
    for worker in ("gw0", "gw1", "gw2", "gw3"):
        monkeypatch.setenv("PYTEST_XDIST_WORKER", worker)
        monkeypatch.setattr("tests.ports._given", set())
        found += [free_port() for _ in range(20)]
    assert len(set(found)) == len(found)
