"""The quickstart's whole loop with ``engine: vllm`` on a CPU, started like a user's run: every process is real."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.server_quickstart import check_ten_steps

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("vllm_python")]


def test_ten_steps_of_the_quickstart_learn_by_vllm(tmp_path: Path) -> None:
    # vLLM's attention on a CPU takes head dimensions that are multiples of 32.
    check_ten_steps("vllm", tmp_path, ["warm_start.model0.builder_settings.head_dim=32"])
