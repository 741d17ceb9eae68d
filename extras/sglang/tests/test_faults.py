"""Offline contract tests against a stand-in: the engine's reaction to server failures that the true server does not produce on
demand. The conformance suite over the true server tests the HTTP interface."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from extras.sglang.engine import sglang_program
from extras.sglang.tests.conftest import WEIGHTS, Launch, build, misbehave, seen
from services.common.errors import DeadlineError, InfrastructureError, InvalidRequestError
from services.common.kept_tokens import unpack
from services.common.records import Sampling
from services.common.security.keys import VARIABLE
from services.inference.engine.base import FinishReason, Generation, GenerationRequest, KvPolicy, WeightUpdate
from services.inference.engine.served.engine import ServedEngine
from services.inference.engine.served.process import ServerCommand, ServerProcess
from tests.running import is_running
from tests.waiting import WAIT_S, until

FIRST = 10  # the token before the first sampled one


def request(number: int = 0, max_new_tokens: int = 100, stop: tuple[int, ...] = ()) -> GenerationRequest:
    return GenerationRequest(
        request_id=f"r{number}",
        prompt_ids=(1, 2, number, FIRST),
        sampling=Sampling(max_new_tokens=max_new_tokens),
        stop_token_ids=stop,
    )


def version(number: int) -> WeightUpdate:
    return WeightUpdate.full(WEIGHTS, number)


def start(engine: ServedEngine, *requests: GenerationRequest) -> list[asyncio.Future[Generation]]:
    return [asyncio.ensure_future(engine.generate(one)) for one in requests or (request(),)]


async def until_tokens(engine: ServedEngine, count: int) -> None:
    await until(lambda: engine.health().generated_tokens >= count, every_s=0.002)


async def until_all_serve(engine: ServedEngine) -> None:
    await until(lambda: all(server.serving for server in engine.servers))


def check_whole(generation: Generation, count: int = 100) -> None:
    """No token is lost, said twice, or without a log-probability."""
    assert generation.token_ids == [FIRST + 1 + i for i in range(count)]
    assert all((segment.logprobs == -0.25).all() for segment in generation.segments)


# -- drawable tokens ----------------------------------------------------------------------------------------------


def kept_sets(generation: Generation) -> list[tuple[int, ...]]:
    """For each token: the drawable tokens, or a minus and the others."""
    found: list[tuple[int, ...]] = []
    for segment in generation.segments:
        sets = unpack(segment.kept, segment.token_ids)
        for token in range(sets.num_tokens):
            ids = sorted(sets.ids[sets.rows == token].tolist())
            found.append((-1, *ids) if sets.left_out[token] else tuple(ids))
    return found


async def test_what_a_mask_lists_is_told_over_deaths_and_updates(launch: Launch) -> None:
    engine = await launch(token_s=0.01)
    await misbehave(engine, "/generate", die_at=20)
    cut = replace(request(), sampling=Sampling(max_new_tokens=60, top_p=0.9, top_k=3, min_p=0.1))
    (pending,) = start(engine, cut)
    await until_tokens(engine, 30)
    await engine.update(version(1))
    generation = await pending
    assert len(generation.segments) == 2
    assert kept_sets(generation) == [(t, t + 5) for t in generation.token_ids]
    asked = [body["sampling_params"] for route, body in await seen(engine) if route == "/generate"]
    assert {(one["top_p"], one["top_k"], one["min_p"]) for one in asked} == {(0.9, 3, 0.1)}


async def test_forbidden_stop_tokens_are_told_as_left_out(launch: Launch) -> None:
    engine = await launch()
    short = replace(request(stop=(500, 501)), sampling=Sampling(max_new_tokens=10, min_new_tokens=4))
    generation = await engine.generate(short)
    assert kept_sets(generation) == [(-1, 500, 501)] * 4 + [(-1,)] * 6
    untold = await engine.generate(replace(short, request_id="other", record_kept=False))
    assert [segment.kept for segment in untold.segments] == [b""]


# -- a server that dies ------------------------------------------------------------------------------------------


async def test_a_request_whose_server_dies_goes_on_with_the_rest_of_its_budget(launch: Launch) -> None:
    engine = await launch()
    await misbehave(engine, "/generate", die_at=40)
    generation = await engine.generate(request())
    check_whole(generation)
    assert generation.finish_reason is FinishReason.LENGTH
    (second,) = [body for route, body in await seen(engine) if route == "/generate"]
    assert len(second["input_ids"]) == 4 + 40 and second["sampling_params"]["max_new_tokens"] == 60


async def test_another_server_takes_over_while_the_dead_one_comes_back_at_the_newest_version(launch: Launch) -> None:
    engine = await launch(number=2, real=True)
    pending = start(engine, *(request(number) for number in range(8)))
    await until_tokens(engine, 80)
    pid = engine.servers[0].process.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    await engine.update(version(1))
    for generation in await asyncio.gather(*pending):
        check_whole(generation)
        assert {segment.weight_version for segment in generation.segments} == {0, 1}
    await until_all_serve(engine)
    assert [server.version for server in engine.servers] == [1, 1]
    assert engine.servers[0].process.pid != pid


async def test_the_workers_of_a_dead_server_end_before_it_is_started_again(tmp_path: Path) -> None:
    engine = build(tmp_path)
    process = engine.servers[0].process
    with_worker = f'sleep 600 & echo $! >> {tmp_path}/workers; exec "$@"'
    process._command = replace(process._command, argv=("/bin/sh", "-c", with_worker, "sh", *process._command.argv))
    await engine.start()
    try:
        pid = process.pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        await until(lambda: process.pid != pid)
        assert not is_running(int((tmp_path / "workers").read_text().split()[0]))
    finally:
        await engine.stop()


async def break_the_stage(engine: ServedEngine) -> None:
    """An update that fails in the middle of its write, as when memory runs out."""

    class Gone:
        shape, dtype = next(iter(WEIGHTS.values())).shape, next(iter(WEIGHTS.values())).dtype

        def detach(self) -> Any:
            raise MemoryError

    broken: Any = {name: Gone() for name in WEIGHTS}
    with pytest.raises(MemoryError):
        await engine.update(WeightUpdate.full(broken, 1))


async def until_waiting_for_weights(engine: ServedEngine) -> None:
    """The new process answers, but does not serve yet."""
    await until(lambda: engine._fleet._written._waiters)


async def test_a_server_that_comes_back_to_an_incomplete_stage_serves_after_the_next_whole_update(
    launch: Launch,
) -> None:
    engine = await launch()
    await break_the_stage(engine)
    server = engine.servers[0]
    server.process.kill()
    (pending,) = start(engine)
    await until_waiting_for_weights(engine)
    assert not server.serving and not pending.done()
    await engine.update(version(2))
    check_whole(await pending)
    assert server.version == 2


async def test_tokens_after_a_switch_began_are_sampled_again_when_nobody_says_their_version(launch: Launch) -> None:
    engine = await launch()
    await misbehave(engine, "/generate", die_at=80)
    pending = start(engine)
    await until_tokens(engine, 20)
    await engine.update(version(1))
    generation = await pending[0]
    check_whole(generation)
    assert [segment.weight_version for segment in generation.segments] == [0, 1]
    assert 20 <= generation.segments[0].num_tokens < 80


async def test_an_engine_whose_servers_keep_dying_has_failed_and_says_how(launch: Launch) -> None:
    engine = await launch(restarts=0)
    pending = start(engine, request(0), request(1))
    await until_tokens(engine, 4)
    engine.servers[0].process.kill()
    for outcome in await asyncio.gather(*pending, return_exceptions=True):
        assert isinstance(outcome, InfrastructureError)
    assert not engine.health().ok
    assert "sglang-fake-0 was killed by SIGKILL" in engine.health().detail
    with pytest.raises(InfrastructureError, match="more than 0 times in a row"):
        await engine.generate(request())


async def test_a_server_that_gives_no_tokens_is_asked_for_one_then_ended(launch: Launch) -> None:
    engine = await launch(stall_timeout_s=0.3)
    await misbehave(engine, "/generate", stall_at=30)
    await misbehave(engine, "/health_generate", status=503)
    check_whole(await engine.generate(request()))


async def test_a_server_that_is_slow_but_alive_is_left_alone(launch: Launch) -> None:
    engine = await launch(token_s=0.5, stall_timeout_s=0.2)
    pid = engine.servers[0].process.pid
    check_whole(await engine.generate(request(max_new_tokens=3)), 3)
    assert engine.servers[0].process.pid == pid
    assert "/health_generate" in [route for route, _ in await seen(engine)]


async def test_stopping_leaves_nothing_running(launch: Launch) -> None:
    engine = await launch(number=2, real=True)
    pids = [server.process.pid for server in engine.servers]
    stage = engine._stage.directory
    pending = start(engine)
    await until_tokens(engine, 5)
    await engine.stop()
    with pytest.raises(InfrastructureError, match="stopped"):
        await pending[0]
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    assert not stage.exists()


async def test_a_server_answers_its_own_service_alone_and_its_key_is_written_nowhere(launch: Launch) -> None:
    engine = await launch(real=True)
    (server,) = engine.servers
    async with aiohttp.ClientSession() as stranger:
        async with stranger.post(f"{server.client.address}/update_weights_from_disk", json={}) as answer:
            assert answer.status == 401
    key = server.client._session.headers["Authorization"].removeprefix("Bearer ")
    command = Path(f"/proc/{server.process.pid}/cmdline").read_bytes().split(b"\0")
    assert key.encode() not in b" ".join(command)
    assert not Path(os.fsdecode(command[command.index(b"--config") + 1])).exists()
    assert key not in server.process.log_path.read_text()


# -- a server that does not come up -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        ("torch.OutOfMemoryError: CUDA out of memory.", r"sglang\.memory_share"),
        ("ValueError: Loaded weights leave no GPU memory. Raise --mem-fraction-static", r"sglang\.memory_share"),
        ("server: error: unrecognized arguments: --no-such-thing 3", r"sglang\.extra_arguments"),
        ("OSError: /nowhere does not appear to have a file named config.json", r"policies\.<name>\.model\.path"),
        ("RuntimeError: CUDA error: invalid device ordinal", r"inference\.<name>\.gpus"),
        ("ModuleNotFoundError: No module named 'sglang'", r"ROLLMILL_SGLANG_PYTHON"),
    ],
)
async def test_a_death_while_loading_is_told_with_its_last_words_and_what_may_help(
    tmp_path: Path, words: str, hint: str
) -> None:
    engine = build(tmp_path)
    process = engine.servers[0].process
    script = 'echo Loading weights; echo "$0"; exit 1'
    process._command = replace(process._command, argv=("/bin/sh", "-c", script, words))
    with pytest.raises(InfrastructureError, match=hint) as caught:
        await engine.start()
    first, second, *_ = caught.value.message.splitlines()
    assert first.startswith("the SGLang server sglang-fake-0 exited with 1 while loading")
    assert second.strip() == words  # the line with the cause, before the rest of the log
    await engine.stop()


async def test_a_server_is_not_told_where_keys_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "keys"))
    says = f"import os, sys; sys.exit(repr(os.environ.get({VARIABLE!r})))"
    command = ServerCommand(name="sglang-fake-0", argv=(sys.executable, "-c", says), program=sglang_program(["cpu"]))
    with pytest.raises(InfrastructureError, match="None"):
        await ServerProcess(command, tmp_path / "log", 20.0).start(0)


async def test_a_server_that_does_not_answer_is_named_after_its_deadline(tmp_path: Path) -> None:
    engine = build(tmp_path, "--never-ready", ready_timeout_s=0.7)
    with pytest.raises(DeadlineError, match=r"sglang-fake-0 did not answer within 0\.7 s"):
        await engine.start()
    await engine.stop()


async def test_a_server_that_is_frozen_before_it_takes_a_request_is_started_anew(
    launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.inference.engine.served.fleet.STALL_ANSWER_S", 0.5)
    engine = await launch(stall_timeout_s=0.2, real=True)
    (server,) = engine.servers
    frozen = server.process.pid
    assert frozen is not None
    os.kill(frozen, signal.SIGSTOP)
    async with asyncio.timeout(WAIT_S):
        check_whole(await engine.generate(request()))
    assert server.process.pid != frozen


# -- an update that goes wrong ------------------------------------------------------------------------------------


def updates(asked: list[tuple[str, Any]], number: int) -> int:
    """Times that a server was told to load a version."""
    return sum(route == "/update_weights_from_disk" and body["weight_version"] == str(number) for route, body in asked)


async def test_a_server_that_refuses_twice_is_started_anew_with_the_version(launch: Launch) -> None:
    engine = await launch(number=2)
    await misbehave(engine, "/update_weights_from_disk", status=400, times=2)
    pid = engine.servers[0].process.pid
    pending = start(engine, *(request(number) for number in range(6)))
    await until_tokens(engine, 30)
    await engine.update(version(1))  # the other server took the version
    assert engine.version == 1
    for generation in await asyncio.gather(*pending):
        check_whole(generation)
    await until_all_serve(engine)
    assert engine.servers[0].process.pid != pid
    assert [server.version for server in engine.servers] == [1, 1]


async def test_an_update_that_no_server_takes_fails_and_may_be_given_again(launch: Launch) -> None:
    engine = await launch()
    await misbehave(engine, "/update_weights_from_disk", status=500, times=2)
    with pytest.raises(InfrastructureError, match="no SGLang server took version 1"):
        await engine.update(version(1))
    assert engine.version == 0
    await engine.update(version(1))
    assert engine.version == 1
    generation = await engine.generate(request())
    assert [segment.weight_version for segment in generation.segments] == [1]


async def test_an_update_without_an_answer_is_in_doubt_too(launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = await launch()
    monkeypatch.setattr("extras.sglang.engine.UPDATE_TIMEOUT_S", 0.5)
    await misbehave(engine, "/update_weights_from_disk", hang_s=1.0, applied=False)
    await engine.update(version(1))
    assert updates(await seen(engine), 1) == 2


async def test_a_kept_cache_is_paused_in_place_and_not_flushed(launch: Launch) -> None:
    engine = await launch(kv_policy=KvPolicy.KEEP)
    pending = start(engine)
    await until_tokens(engine, 10)
    await engine.update(version(1))
    marks = [(s.weight_version, s.mixed_cache) for s in (await pending[0]).segments]
    assert marks == [(0, False), (1, True)]
    asked = await seen(engine)
    assert ("/pause_generation", {"mode": "in_place"}) in asked
    assert [body["flush_cache"] for route, body in asked if route == "/update_weights_from_disk"] == [True, False]


# -- a request that goes wrong ------------------------------------------------------------------------------------


async def test_a_server_that_is_busy_or_broken_is_tried_again(launch: Launch) -> None:
    engine = await launch()
    await misbehave(engine, "/generate", status=503, times=2)
    check_whole(await engine.generate(request()))


async def test_a_request_that_is_always_interrupted_is_an_infrastructure_failure(launch: Launch) -> None:
    engine = await launch()
    await misbehave(engine, "/generate", status=503, times=9, message="queue full")
    with pytest.raises(InfrastructureError, match=r"interrupted 5 times.*queue full"):
        await engine.generate(request())
    assert engine.health().running == 0


async def test_a_refused_request_is_its_makers_mistake(launch: Launch) -> None:
    engine = await launch()
    await misbehave(engine, "/generate", status=400, message="no such token")
    with pytest.raises(InvalidRequestError, match="no such token"):
        await engine.generate(request())


async def test_a_leg_that_the_server_aborts_goes_on_with_what_it_had(launch: Launch) -> None:
    engine = await launch()
    await misbehave(engine, "/generate", aborted_at=30)
    check_whole(await engine.generate(request()))


async def test_a_stop_that_the_request_did_not_ask_for_is_no_stop(launch: Launch) -> None:
    engine = await launch()
    await misbehave(engine, "/generate", eos=FIRST + 20)
    generation = await engine.generate(request(stop=(FIRST + 50,)))
    check_whole(generation, 50)
    assert generation.finish_reason is FinishReason.STOP


async def test_tokens_without_spans_are_taken_when_no_switch_came_between(launch: Launch) -> None:
    engine = await launch()
    await misbehave(engine, "/generate", no_spans=True)
    check_whole(await engine.generate(request()))


async def test_a_log_probability_that_is_no_number_fails_its_request_alone(launch: Launch) -> None:
    engine = await launch()
    await misbehave(engine, "/generate", nan_at=5)
    with pytest.raises(InfrastructureError, match="not finite under weight version 0"):
        await engine.generate(request())
    check_whole(await engine.generate(request()))


async def test_a_chunk_that_makes_no_sense_interrupts_and_is_played_again(launch: Launch) -> None:
    engine = await launch()
    await misbehave(engine, "/generate", nonsense_at=5)
    check_whole(await engine.generate(request()))


async def test_a_server_that_does_not_hear_an_abort_is_not_waited_for(
    launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.inference.engine.served.engine.ABORT_TIMEOUT_S", 0.3)
    engine = await launch()
    await misbehave(engine, "/generate", stall_at=10)
    seen_tokens: list[int] = []

    def enough(token: int) -> bool:
        seen_tokens.append(token)
        return len(seen_tokens) == 10

    generation = await engine.generate(replace(request(), watch=enough))
    assert generation.finish_reason is FinishReason.STOP
    check_whole(generation, 10)


async def test_requests_that_begin_alike_go_to_one_server_and_others_are_spread(launch: Launch) -> None:
    engine = await launch(number=2)
    alike = GenerationRequest(
        request_id="x",
        prompt_ids=tuple(range(100, 300)),
        sampling=Sampling(max_new_tokens=3),
        stop_token_ids=(),
    )
    for _ in range(4):
        await engine.generate(alike)
    asked = [sum(route == "/generate" for route, _ in await seen(engine, server)) for server in (0, 1)]
    assert sorted(asked) == [0, 4]
    await asyncio.gather(*start(engine, *(request(number, 60) for number in range(12))))
    both = [sum(route == "/generate" for route, _ in await seen(engine, server)) for server in (0, 1)]
    assert min(both) >= 4
