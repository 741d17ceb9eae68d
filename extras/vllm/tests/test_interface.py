"""The check that a vLLM has the interface which the engine relies on, against vLLMs that are made here."""

from __future__ import annotations

import dataclasses
import types
from typing import Any, Literal

import pytest

from extras.vllm.server import interface


def made(leave_out: str = "", without: str = "", mode: str = interface.PAUSE_MODE) -> Any:
    """A loader of modules that have the interface, but for one object or one name of an object."""

    def load(module: str) -> Any:
        found: Any = types.SimpleNamespace()
        of_this = [where for where in interface.RELIED_ON if where.partition(":")[0] == module]
        if module == interface.PAUSE_MODES.partition(":")[0]:
            return types.SimpleNamespace(PauseMode=Literal["abort", mode])  # type: ignore[valid-type]
        if not of_this:
            raise ModuleNotFoundError(module)
        for where in of_this:
            if where == leave_out:
                continue
            names = [name for name in interface.RELIED_ON[where] if f"{where} {name}" != without]
            *path, last = where.partition(":")[2].split(".")
            owner = found
            for name in path:
                if not hasattr(owner, name):
                    setattr(owner, name, types.SimpleNamespace())
                owner = getattr(owner, name)
            setattr(owner, last, dataclasses.make_dataclass(last.strip("_").title(), names))
        return found

    return load


def test_a_vllm_with_the_interface_is_accepted() -> None:
    assert interface.missing(made()) == []


@pytest.mark.parametrize("where", sorted(interface.RELIED_ON))
def test_a_vllm_that_lacks_an_object_or_a_name_is_refused_with_the_name(where: str) -> None:
    (lacking,) = interface.missing(made(leave_out=where))
    assert lacking.startswith(where)
    for name in interface.RELIED_ON[where]:
        assert interface.missing(made(without=f"{where} {name}")) == [f"{where} without {name}"]


def test_a_vllm_that_cannot_freeze_requests_is_refused() -> None:
    assert interface.missing(made(mode="wait")) == ["vllm.v1.engine:PauseMode without keep"]
