"""Every RPC of every proto is in the table, and the table grants the calls that each role needs, and no more."""

from __future__ import annotations

import importlib
import pkgutil

import pytest
from google.protobuf import descriptor_pool
from google.protobuf.descriptor import ServiceDescriptor

from services.common import pb
from services.common.security.identity import HTTP, RPCS, allowed
from services.common.security.keys import Role


def services_of_the_protos() -> list[ServiceDescriptor]:
    found = []
    for module in pkgutil.iter_modules(pb.__path__):
        if module.name.endswith("_pb2"):
            file = importlib.import_module(f"{pb.__name__}.{module.name}").DESCRIPTOR
            assert descriptor_pool.Default().FindFileByName(file.name) is file
            found += file.services_by_name.values()
    return found


def test_every_rpc_of_every_proto_is_in_the_table_and_nothing_else_of_ours() -> None:
    declared = {service.full_name: {method.name for method in service.methods} for service in services_of_the_protos()}
    assert len(declared) >= 9
    assert {name: set(methods) for name, methods in RPCS.items() if name.startswith("rollmill.")} == declared


def test_nothing_is_open_to_everybody_and_nothing_is_nobodys() -> None:
    for service, methods in RPCS.items():
        for method in methods:
            roles = allowed(f"/{service}/{method}")
            assert roles
            assert Role.AGENT not in roles, "agents have the endpoint only"
    assert all(allowed(f"http:{group}") for group in HTTP)


@pytest.mark.parametrize("what", ["/rollmill.v1.RunService/Unknown", "/", "", "http:unknown", "RunService/StopRun"])
def test_what_is_not_in_the_table_is_nobodys(what: str) -> None:
    assert allowed(what) == frozenset()
