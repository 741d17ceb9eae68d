"""``millrace trajectories`` reads what is on the disk, and nothing else."""

from __future__ import annotations

import io
import socket
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from services.cli.trajectories import show
from tests.unit.inference.fakes import qwen_like_tokenizer


class _Recipe:
    def __init__(self, path: str) -> None:
        self.path = path

    def model_path(self, policy: str, run_dir: Path) -> str:
        return self.path


def row(*token_ids: int) -> dict[str, Any]:
    segments = [{"source": "policy", "token_ids": list(token_ids), "weight_version": 1}]
    sequence = {"policy": "m", "role": "r", "reward": 1.0, "stop_reason": "stop", "segments": segments}
    return {"task_group_id": "g", "index": 0, "sequences": [sequence]}


def shown(monkeypatch: pytest.MonkeyPatch, path: str, *rows: dict[str, Any]) -> str:
    monkeypatch.setattr("services.cli.trajectories.load_resolved", lambda _: _Recipe(path))
    out = io.StringIO()
    show(Path("run"), list(rows), Console(file=out, width=200))
    return out.getvalue()


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What was dialled or looked up; each attempt fails."""
    asked: list[object] = []

    def refuse(*arguments: object, **_: object) -> None:
        asked.append(arguments)
        raise OSError("no network in this test")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    return asked


@pytest.mark.parametrize("path", ["/gone/model", "gone/model", "gone", "runs/gone/warm_start/model", "./gone"])
def test_a_model_that_is_gone_is_said_once_and_ids_are_shown(
    monkeypatch: pytest.MonkeyPatch, no_network: list[object], path: str
) -> None:
    told = shown(monkeypatch, path, row(7, 8, 9), row(10, 11))
    assert "[7 8 9]" in told and "[10 11]" in told
    assert told.count("is not on this machine") == 1 and path in told
    assert no_network == []


def test_a_tokenizer_that_is_cut_off_does_not_hide_the_ids(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0"')
    assert "[7 8 9]" in shown(monkeypatch, str(tmp_path), row(7, 8, 9))


def test_what_a_policy_wrote_sends_nothing_to_the_terminal(
    monkeypatch: pytest.MonkeyPatch, no_network: list[object], tmp_path: Path
) -> None:
    tokenizer = qwen_like_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    for text in ("\x1b]0;title\x07", "\x1b[2J", "\x9b31m", "a\rb", "\x08\x08", "\x1b]52;c;eA==\x07"):
        told = shown(monkeypatch, str(tmp_path), row(*tokenizer.encode(f"begin {text} end\n\tline")))
        assert "begin" in told and "end" in told
        assert not [c for c in told if c != "\n" and (c < " " or "\x7f" <= c < "\xa0")]
    assert no_network == []
