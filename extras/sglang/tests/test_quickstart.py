"""The quickstart's whole loop with ``engine: sglang`` on a CPU, started like a user's run: every process is real."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.server_quickstart import check_ten_steps

pytestmark = [pytest.mark.sglang, pytest.mark.usefixtures("sglang_python")]


def test_ten_steps_of_the_quickstart_learn_by_sglang(tmp_path: Path) -> None:
    check_ten_steps("sglang", tmp_path)
