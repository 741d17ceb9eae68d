"""Runs test code and the program under test in one process.

The tests see the program's functions themselves, so the program can change anything in this process, also the result:
the judge marks such a verdict as opaque. The nonce, which is told after the last test, shows that the tests have come to
their end; it keeps a program from passing by accident, by an early exit or by its own output.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any

from . import calls, prelude, program


def run(source: bytes, payload: dict[str, Any], note_fd: int, tell: Callable[[bytes], None]) -> int:
    """The exit code; ``tell`` gets the nonce, framed. Payload: tests, preamble, entry_point, remote, supplied, prelude,
    nonce."""
    streams = [sys.stdout, sys.stderr]

    def check() -> None:
        module = calls.load(source, note_fd)
        names = _names_of_tests(payload)
        names |= {name: vars(module)[name] for name in payload["remote"] if name in vars(module)}
        if payload["entry_point"]:
            names["candidate"] = calls.find(module, calls.defined_entry(module, payload["entry_point"]))
        if "unittest" in payload["tests"]:  # the call would end the process; the test cases are run behind it
            vars(importlib.import_module("unittest"))["main"] = lambda *given, **named: None
        try:
            exec(compile(payload["tests"], "<tests>", "exec", dont_inherit=True), names)
        except AssertionError as error:  # a wrong answer: the program itself has not failed
            program.report(error, note_fd)
            return
        tell(calls.framed(payload["nonce"].encode()))

    exit_code = program.guarded(check, note_fd)
    program.flush([sys.stdout, sys.stderr, *streams])
    return exit_code


def _names_of_tests(payload: dict[str, Any]) -> dict[str, Any]:
    """Names of the tests before those of the program: of the library, and of their own preamble."""
    names: dict[str, Any] = {"__name__": "__main__"}
    prelude.fill_tests(names, payload["prelude"])
    for name, place in payload["supplied"].items():
        module, _, attribute = place.partition(":")
        found = importlib.import_module(module)
        names[name] = getattr(found, attribute) if attribute else found
    exec(compile(payload["preamble"], "<preamble>", "exec", dont_inherit=True), names)
    return names
