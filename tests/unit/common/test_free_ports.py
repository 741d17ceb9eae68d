"""Ports that are still free when the process that is to have them binds them."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from services.common.system import machine as module
from services.common.system.machine import free_ports, is_free


def test_ports_are_different_free_and_out_of_the_kernels_reach() -> None:
    ports = free_ports(20)
    assert len(set(ports)) == 20
    assert all(is_free(port) for port in ports)
    assert max(ports) < module._begin_of_ephemeral()


def test_a_port_in_use_is_passed_over() -> None:
    (first, *_) = free_ports(1)
    with socket.socket() as holder:
        # as servers do: a connection that was closed there may linger
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", first))
        holder.listen()
        assert not is_free(first)
        assert first not in free_ports(5)


def test_ports_to_avoid_are_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = free_ports(2)
    assert not {first, second} & set(free_ports(5, avoid={first, second}))
    of_the_kernel = module._of_the_kernel

    def chosen(count: int) -> list[int]:
        return [first, *of_the_kernel(count - 1)]

    monkeypatch.setattr(module, "_WIDTH", 0)
    monkeypatch.setattr(module, "_of_the_kernel", chosen)
    ports = free_ports(3, avoid={first})
    assert len(ports) == 3 and first not in ports


def test_where_nothing_lies_below_the_kernels_range_it_chooses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "range").write_text("1024\t65535\n")
    monkeypatch.setattr(module, "_RANGE", tmp_path / "range")
    ports = free_ports(5)
    assert len(set(ports)) == 5
    assert all(is_free(port) for port in ports)
