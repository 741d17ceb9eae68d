"""Ports that are still free when the process that is to have them binds them; cores that the process may use."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from services.common.system import machine as module
from services.common.system.machine import free_ports, is_free, num_cores


def test_ports_are_different_free_and_out_of_the_kernels_reach() -> None:
    assert free_ports(0) == []
    ports = free_ports(20)
    assert len(set(ports)) == 20
    assert all(is_free(port) for port in ports)
    assert max(ports) < int(module._RANGE.read_text().split()[0])


def test_a_port_in_use_is_passed_over() -> None:
    (first, *_) = free_ports(1)
    with socket.socket() as holder:
        # as servers do: a connection that was closed there may linger
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", first))
        holder.listen()
        assert not is_free(first)
        assert first not in free_ports(5)


def test_ports_to_avoid_are_passed_over() -> None:
    avoided = set(free_ports(2))
    assert not avoided & set(free_ports(5, avoid=avoided))


def test_where_nothing_lies_below_the_kernels_range_others_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "range").write_text("1024\t65535\n")
    monkeypatch.setattr(module, "_RANGE", tmp_path / "range")
    assert len(set(free_ports(5))) == 5


@pytest.mark.parametrize(
    ("quota", "cores"),
    [("max 100000", 8), ("200000 100000", 2), ("150000 100000", 1.5), ("1600000 100000", 8), ("", 8)],
)
def test_a_containers_share_of_time_counts_as_cores(
    quota: str, cores: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    (tmp_path / "cpu.max").write_text(quota)
    assert num_cores(tmp_path / "cpu.max") == cores
    assert num_cores(tmp_path / "none") == 8
