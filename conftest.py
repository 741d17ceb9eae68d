"""Fixtures of all tests: those of `tests/` and those beside each extra."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
import structlog

from services.common.telemetry import logs
from tests import needs
from tests.ports import free_port

pytest_plugins = ["tests.deep_trees", "tests.failed_alone", "tests.forks", "tests.not_exercised", "tests.order"]

# Tests start hundreds of processes; each would compile every module again.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# The default draws a traceback with the values of all names, which takes a second.
structlog.get_config()["processors"][-1].exception_formatter = structlog.dev.plain_traceback

# No deadline: timings never decide a test. No database: a failure prints how to repeat it.
hypothesis.settings.register_profile("rollmill", deadline=None, database=None, derandomize=True, max_examples=100)
hypothesis.settings.load_profile("rollmill")


@pytest.fixture(autouse=True)
def fresh_logs() -> Iterator[None]:
    """No test sees the log settings or the bound ids of another."""
    yield
    logs.close()
    structlog.reset_defaults()
    structlog.contextvars.clear_contextvars()


@pytest.fixture(autouse=True)
def usual_depth() -> Iterator[None]:
    """The stack depth of judged programs, which their harness sets in the process of a test, ends with the test."""
    depth = sys.getrecursionlimit()
    yield
    sys.setrecursionlimit(depth)


@pytest.fixture
def unused_tcp_port() -> int:
    """Instead of pytest-asyncio's, which is of the kernel's ephemeral range."""
    return free_port()


@pytest.fixture(scope="session")
def data_root() -> Path:
    """The folder of real rows, named by ROLLMILL_DATA_ROOT; tests that need the rows are skipped without the folder."""
    needs.check("data root")
    return Path(os.environ["ROLLMILL_DATA_ROOT"])


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the repository."""
    return Path(__file__).resolve().parent


@pytest.fixture(scope="session")
def sglang_python() -> str:
    """The interpreter that has SGLang; engines read the variable themselves."""
    needs.check("SGLang")
    return os.environ["ROLLMILL_SGLANG_PYTHON"]


@pytest.fixture(scope="session")
def vllm_python() -> str:
    """The interpreter that has vLLM; engines read the variable themselves."""
    needs.check("vLLM")
    return os.environ["ROLLMILL_VLLM_PYTHON"]
