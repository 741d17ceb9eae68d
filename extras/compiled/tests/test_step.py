"""The compiled decoding step: its draws, its independence of other rows, broken values, threads, and no compiler at all."""

from __future__ import annotations

import copy
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import structlog
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from extras.compiled import step
from extras.compiled import step as compiler
from services.inference.engine.torch.decoder import Decoder
from services.inference.engine.torch.slots import sample_plain
from tests.random_models import TOLERANCE, build_model, make_prompt

MODEL = build_model("qwen3")
VOCAB = MODEL.config.vocab_size


@pytest.fixture
def no_library() -> Any:
    compiler.load_library.cache_clear()
    yield
    compiler.load_library.cache_clear()


def decoder(num_slots: int = 8) -> Decoder:
    built = Decoder(copy.deepcopy(MODEL), num_slots=num_slots, context_length=96)
    assert built.extends_up_to
    return built


def fill(built: Decoder, slot: int, tokens: list[int]) -> None:
    num = len(tokens)
    built.cache.own(np.array([slot]), np.array([0]), np.array([num + 1]))
    built.extend_each(np.full(num, slot), np.asarray(tokens, dtype=np.int64), np.arange(num))


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32), st.floats(0.0, 40.0))
def test_a_draw_is_that_of_torch(seed: int, scale: float) -> None:
    built = decoder()
    rng = np.random.default_rng(seed)
    uniform = rng.random(8)
    uniform[0] = 0.0
    with torch.inference_mode():
        built.cache.own(np.arange(8), np.zeros(8, int), np.ones(8, int))
        logits = built.decode(np.arange(8), np.arange(8), np.zeros(8, dtype=np.int64))
        logits.copy_(torch.from_numpy(rng.normal(0, scale, logits.shape)))
        logits[1, ::2] = -torch.inf
        wanted = sample_plain(logits.clone(), uniform)
        exact = logits.double().log_softmax(-1)
        found = built.draw(logits, uniform)
    assert np.isfinite(found.logprobs).all()
    # A number at the boundary between two tokens may fall to either by a rounding.
    close = exact.exp().cumsum(-1)
    for row in np.flatnonzero(found.tokens != wanted.tokens):
        edges = close[row, min(found.tokens[row], wanted.tokens[row])]
        assert abs(float(edges) - uniform[row]) < 1e-6
    drawn = exact.gather(1, torch.from_numpy(found.tokens)[:, None])[:, 0].numpy()
    assert np.abs(found.logprobs - drawn).max() <= 1e-5


def test_the_result_of_a_row_does_not_depend_on_the_other_rows() -> None:
    together, alone = decoder(), decoder()
    prompts = [make_prompt(10 + 9 * slot, slot) for slot in range(8)]
    with torch.inference_mode():
        for slot in range(8):
            fill(together, slot, prompts[slot])
        fill(alone, 3, prompts[3])
        lengths = np.asarray([len(prompt) for prompt in prompts])
        slots = np.asarray([6, 3, 1, 0, 7])  # any, in any order
        many = together.decode(slots, slots + 5, lengths[slots])[1].clone()
        one = alone.decode(slots[1:2], slots[1:2] + 5, lengths[slots[1:2]])[0]
    assert torch.equal(many, one)


def test_threads_share_the_rows_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    parted = decoder(32)
    monkeypatch.undo()
    single = decoder(32)
    slots, none = np.arange(32), np.zeros(32, dtype=np.int64)
    with torch.inference_mode():
        for num in (32, 17, 2):
            for built in (parted, single):
                built.cache.own(slots, none, none + 1)
            found, wanted = (built.decode(slots[:num], slots[:num], none[:num]) for built in (parted, single))
            assert torch.equal(found, wanted)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_only_the_rows_that_read_a_broken_value_are_not_finite(value: float) -> None:
    built = decoder()
    slots, positions = np.arange(4), np.full(4, 12)
    with torch.inference_mode():
        for slot in range(4):
            fill(built, slot, make_prompt(12, slot))
        blocks = built.cache.table[:, 0]
        built.cache.kv[0, blocks[2], 5] = value
        built.cache.kv[0, blocks[1], 13] = value  # behind the last position
        drawn = built.draw(built.decode(slots, slots, positions), np.full(4, 0.5))
    assert np.isfinite(drawn.logprobs).tolist() == [True, True, False, True]


def test_a_model_without_a_compiler_decodes_in_torch_and_the_log_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, no_library: None
) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    with structlog.testing.capture_logs() as logs:
        built = [Decoder(copy.deepcopy(MODEL), num_slots=1, context_length=16) for _ in range(2)]
    assert not any(each.extends_up_to for each in built)
    (warning,) = logs
    assert (
        warning["log_level"] == "warning" and "no-such-compiler" in warning["reason"] and "apt-get" in warning["action"]
    )
    with torch.inference_mode():
        built[0].cache.own(np.zeros(1, int), np.zeros(1, int), np.ones(1, int))
        logits = built[0].decode(np.zeros(1, int), np.asarray([7]), np.zeros(1, int))
        wanted = MODEL(torch.tensor([[7]])).logits[0]
    assert (logits - wanted).abs().max() <= 10 * TOLERANCE


def test_a_compiler_that_fails_is_named_with_its_output(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, no_library: None
) -> None:
    source = tmp_path / "broken.c"
    source.write_text("int here(void) { return nowhere; }")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with structlog.testing.capture_logs() as logs:
        assert compiler.load_library(source) is None
    assert "nowhere" in logs[0]["reason"]


def test_a_library_is_compiled_once_by_several_processes_and_kept_where_only_the_user_writes(tmp_path: Path) -> None:
    code = (
        "from extras.compiled.step import load_library\n"
        "from pathlib import Path; import sys\n"
        "assert load_library(Path(sys.argv[1])).panel_width() in (8, 16, 32)\n"
    )
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    command = [sys.executable, "-c", code, str(step.SOURCE)]
    running = [subprocess.Popen(command, env=environment) for _ in range(2)]
    assert [process.wait(120) for process in running] == [0, 0]
    folder = tmp_path / "rollmill" / "native"
    (made,) = folder.iterdir()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    written = made.stat().st_mtime_ns
    subprocess.run(command, env={**environment, "PATH": f"{tmp_path}:{os.environ['PATH']}"}, check=True, timeout=120)
    assert made.stat().st_mtime_ns == written


def test_a_cache_that_others_may_write_is_not_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = tmp_path / "rollmill" / "native"
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    assert compiler._folder() != folder
    folder.chmod(0o755)
    assert compiler._folder() == folder


def test_only_small_float32_models_on_a_cpu_decode_in_compiled_code() -> None:
    assert Decoder(build_model("qwen3"), num_slots=1, context_length=16).extends_up_to
    half = build_model("qwen3").to(torch.bfloat16)
    assert not Decoder(half, num_slots=1, context_length=16).extends_up_to
