"""Fixtures of all tests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
import structlog

from services.common import logs
from tests import needs

pytest_plugins = ["tests.not_exercised"]

# No deadline: timings never decide a test. No database: a failure prints how to repeat it.
hypothesis.settings.register_profile("millrace", deadline=None, database=None, derandomize=True, max_examples=100)
hypothesis.settings.load_profile("millrace")


@pytest.fixture(autouse=True)
def fresh_logs() -> Iterator[None]:
    """No test sees the log settings or the bound ids of another."""
    yield
    logs.close()
    structlog.reset_defaults()
    structlog.contextvars.clear_contextvars()


@pytest.fixture(scope="session")
def data_root() -> Path:
    """The folder of real rows, named by MILLRACE_DATA_ROOT; tests that want them are skipped without it."""
    needs.check("data root")
    return Path(os.environ["MILLRACE_DATA_ROOT"])


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the repository."""
    return Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def sglang_python() -> str:
    """The interpreter that has SGLang; engines find it by the variable themselves."""
    needs.check("SGLang")
    return os.environ["MILLRACE_SGLANG_PYTHON"]
