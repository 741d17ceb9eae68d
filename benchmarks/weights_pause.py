"""Measures the cost of a new version for generation: the pause of a swap, and tokens per second with a publish every
second.

A publisher process publishes a version with about 1% of the weights changed, every second. The torch engine generates
all the while; its thread has a core of its own, fetching, verifying and the event loop have another, the publisher a
third. With two cores the publisher is on the second, with one core all are on that core: kept_share then includes the
cost of publishing.

- pause: the gap between the ends of the two decoding steps around a swap (kept KV cache), against one decoding step
  plus a scatter of the same changes into the same tensors, measured in the same run.
- kept_share: tokens/s with a publish every second over tokens/s without, windows taken in turns.
- recompute_ratio: the cost of a swap that recomputes the KV cache of live requests, over prefilling those tokens.
- thrown_away: tokens that were sampled and not delivered; 0 unless the plain arm is meant.

The plain arm is the way of synchronous systems: abort all requests, load the whole state dict, start the prompts again.

    python benchmarks/weights_pause.py [--quick] [--seed 3]
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import logging
import multiprocessing
import os
import statistics
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import structlog
import torch

from benchmarks._bench import median_and_spread, report, split
from benchmarks._weight_versions import POLICY, RUN, VersionMaker
from benchmarks._workload import MODELS
from services.common.config.training import WeightsConfig
from services.common.records import Sampling, WeightVersion
from services.common.weights.snapshot import TensorSpec, named_weights
from services.inference.engine.base import Generation, GenerationRequest, KvPolicy, WeightUpdate
from services.inference.engine.torch.engine import TorchEngine
from services.inference.weights.fetch import Relay
from services.inference.weights.mirror import Mirror
from services.inference.weights.updater import SourceFetcher, WeightUpdater
from services.trainer.publish import PublisherProcess
from services.trainer.publisher import PublisherSettings

SLOTS = 32
PROMPT = 64
NEW_TOKENS = 192
PUBLISH_EVERY_S = 1.0
MODEL = "small"


# -- the publishing side, a process of its own ---------------------------------------------------------------------


def _publish_on_request(pipe: Connection, specs: list[TensorSpec], core: int, seed: int) -> None:
    os.sched_setaffinity(0, {core})
    directory = Path(tempfile.mkdtemp(prefix="rollmill-bench-", dir="/dev/shm"))
    publisher = PublisherProcess(
        PublisherSettings(run_id=RUN, policy=POLICY, weights=WeightsConfig(port=0, transfer="delta", keep_versions=3))
    )
    publisher.start()
    maker = VersionMaker(specs, directory, seed)
    while pipe.recv() == "publish":
        path, manifest = maker.write()
        publisher.announce(path)
        pipe.send(
            WeightVersion(policy=POLICY, number=manifest.version, digest=manifest.digest, sources=(publisher.address,))
        )
    publisher.stop()
    for left in directory.iterdir():
        left.unlink()
    directory.rmdir()


class PublishingProcess:
    """Makes and serves the next version when asked."""

    def __init__(self, specs: list[TensorSpec], core: int, seed: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        arguments = (theirs, specs, core, seed)
        self._process = context.Process(target=_publish_on_request, args=arguments, daemon=False)
        self._process.start()

    async def publish(self) -> WeightVersion:
        self._pipe.send("publish")
        version: WeightVersion = await asyncio.to_thread(self._pipe.recv)
        return version

    def close(self) -> None:
        self._pipe.send("end")
        self._process.join(20)


# -- the generating side -------------------------------------------------------------------------------------------


@dataclass
class Steps:
    """The time and number of tokens of each decoding step. Written by the engine's thread."""

    times: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)

    def on_tokens(self, count: int, at: float) -> None:
        self.times.append(time.perf_counter())
        self.tokens.append(count)

    def rate(self, begin: float, end: float) -> float:
        return sum(n for t, n in zip(self.times, self.tokens, strict=False) if begin <= t < end) / (end - begin)

    def gap_around(self, begin: float, end: float) -> float:
        """From the end of the last step before a swap to the end of the first step with the new version."""
        before = max(t for t in self.times if t <= begin)
        return min(t for t in self.times if t > end) - before


class Replica:
    """Engine, mirror, updater, and as many streams of requests as the engine has slots."""

    def __init__(self, kv_policy: KvPolicy, seed: int) -> None:
        self.steps = Steps()
        self.model = build_model(seed)
        self.mirror = Mirror(POLICY)
        self.mirror.fill(named_weights(self.model), run_id=RUN, version=0, dtype="bfloat16")
        self.engine = TorchEngine(
            self.model, num_slots=SLOTS, context_length=512, kv_policy=kv_policy, on_tokens=self.steps.on_tokens
        )
        fetcher = SourceFetcher(RUN, relay=Relay(self.mirror))
        self.updater = WeightUpdater(self.mirror, self.engine, fetcher)
        self.delivered = 0
        self.versions: set[int] = set()
        self._numbers = itertools.count()
        self._rng = np.random.default_rng(seed)
        self._ending = False
        self._calls: set[asyncio.Future[Generation]] = set()
        self.thrown_away = 0
        self.swaps: list[tuple[float, float]] = []  # begin and end in the engine's thread
        self._time_swaps()

    def _time_swaps(self) -> None:
        core = self.engine._core
        update = core.update

        def timed(prepared: Any) -> float:
            began = time.perf_counter()
            seconds = update(prepared)
            self.swaps.append((began, time.perf_counter()))
            return seconds

        core.update = timed  # type: ignore[method-assign]

    @asynccontextmanager
    async def generating(self, engine_core: int) -> AsyncIterator[None]:
        before = {thread.ident for thread in threading.enumerate()}
        await self.engine.start()
        [thread] = [t for t in threading.enumerate() if t.ident not in before and t.name == "torch-engine"]
        assert thread.native_id is not None
        os.sched_setaffinity(thread.native_id, {engine_core})
        following = asyncio.create_task(self.updater.run())
        streams = [asyncio.create_task(self._stream(slot)) for slot in range(SLOTS)]
        await asyncio.sleep(0.5)
        try:
            yield
        finally:
            self._ending = True
            await asyncio.gather(*streams)
            self.thrown_away += self.engine.counters.generated - self.delivered
            following.cancel()
            await self.engine.stop()

    async def _stream(self, slot: int) -> None:
        # Different first lengths, so that the slots do not all end in the same step.
        length = PROMPT + 1 + slot * NEW_TOKENS // SLOTS
        while not self._ending:
            prompt = tuple(int(t) for t in self._rng.integers(0, MODELS[MODEL]["vocab_size"], PROMPT))
            number = next(self._numbers)
            request = GenerationRequest(
                request_id=str(number),
                prompt_ids=prompt,
                sampling=Sampling(max_new_tokens=length),
                stop_token_ids=(),
                seed=number,
            )
            length = NEW_TOKENS
            call = asyncio.ensure_future(self.engine.generate(request))
            self._calls.add(call)
            try:
                result = await call
            except asyncio.CancelledError:
                if not call.cancelled():
                    raise
                continue  # the plain arm: what was sampled is lost
            finally:
                self._calls.remove(call)
            assert all(segment.weight_version is not None for segment in result.segments)
            self.versions |= {segment.weight_version for segment in result.segments}
            self.delivered += len(result.token_ids)

    async def abort_all(self) -> None:
        calls = list(self._calls)
        for call in calls:
            call.cancel()
        await asyncio.wait(calls)

    async def time_prefill(self) -> float:
        """Seconds to compute the KV cache of all live requests, by the engine's own code."""

        def prefill() -> float:
            core = self.engine._core
            live = np.flatnonzero(core.table.live)
            core.kv.forget(live=True)
            began = time.perf_counter()
            core.kv.compute(live.tolist())
            return time.perf_counter() - began

        return await self.engine._call("prefill", prefill)


def build_model(seed: int) -> Any:
    from transformers import AutoModelForCausalLM, Qwen3Config

    torch.manual_seed(seed)
    config = Qwen3Config(tie_word_embeddings=True, max_position_embeddings=4096, **MODELS[MODEL])
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa").eval()


async def window(replica: Replica, seconds: float, each_second: Callable[[], Any] | None) -> tuple[float, list[float]]:
    """Tokens per second, and the gap between two steps around each swap."""
    begin = time.perf_counter()
    pauses = []
    if each_second is None:
        await asyncio.sleep(seconds)
    else:
        for second in range(int(seconds / PUBLISH_EVERY_S)):
            await asyncio.sleep(max(0.0, begin + second * PUBLISH_EVERY_S + 0.2 - time.perf_counter()))
            await each_second()
            pauses.append(replica.steps.gap_around(*replica.swaps[-1]))
        await asyncio.sleep(max(0.0, begin + seconds - time.perf_counter()))
    return replica.steps.rate(begin, time.perf_counter()), pauses


async def swapped(replica: Replica, publishing: PublishingProcess) -> None:
    """Publish, and wait until the engine serves the version."""
    version = await publishing.publish()
    replica.updater.offer(version)
    async with asyncio.timeout(30):
        while replica.updater.held().number != version.number:  # noqa: ASYNC110 - a probe, not a service
            await asyncio.sleep(0.002)
    await asyncio.sleep(0.05)  # the step after the swap ends within the window that is looked at


async def plainly(replica: Replica, publishing: PublishingProcess) -> None:
    """Abort everything, load the whole version, start again."""
    version = await publishing.publish()
    await replica.abort_all()
    await replica.engine.update(WeightUpdate.full(replica.mirror.host_tensors(), version.number))
    await asyncio.sleep(0.05)


def time_scatter(replica: Replica, core: int) -> float:
    """In-place scatter of about as many changes as a version has, into clones of the same tensors. Pinned as the engine."""
    rng = np.random.default_rng(0)
    tensors = [t.detach().clone().view(-1).numpy() for t in named_weights(replica.model).values()]
    jobs = []
    for tensor in tensors:
        positions = np.unique(rng.integers(0, len(tensor), max(1, len(tensor) // 100)))
        jobs.append((tensor, positions, rng.standard_normal(len(positions), dtype=np.float32)))
    mine = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    times = []
    for _ in range(9):
        began = time.perf_counter()
        for tensor, positions, values in jobs:
            tensor[positions] = values
        times.append(time.perf_counter() - began)
    os.sched_setaffinity(0, mine)
    return statistics.median(times)


async def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    [[engine_core], [other_core], [publisher_core]] = split(3, at_most=1)
    seconds, pairs = (4.0, 2) if arguments.quick else (10.0, 4)
    torch.set_num_threads(1)
    specs_model = build_model(arguments.seed)
    specs = [TensorSpec(name=n, dtype="bfloat16", shape=tuple(t.shape)) for n, t in named_weights(specs_model).items()]
    os.sched_setaffinity(0, {other_core})
    publishing = PublishingProcess(specs, publisher_core, arguments.seed)
    try:
        kept = Replica(KvPolicy.KEEP, arguments.seed)
        async with kept.generating(engine_core):
            await swapped(kept, publishing)  # the first is a full snapshot
            without, publish, pauses = [], [], []
            for _ in range(pairs):
                without.append((await window(kept, seconds, None))[0])
                rate, gaps = await window(kept, seconds, lambda: swapped(kept, publishing))
                publish.append(rate)
                pauses += gaps
            step_s = float(np.median(np.diff(kept.steps.times[-500:])))
        scatter_s = time_scatter(kept, engine_core)
        anew = Replica(KvPolicy.RECOMPUTE, arguments.seed)
        async with anew.generating(engine_core):
            await swapped(anew, publishing)
            anew_without, anew_publish, prefills = [], [], []
            for _ in range(pairs):
                anew_without.append((await window(anew, seconds, None))[0])
                prefills += [await anew.time_prefill() for _ in range(3)]
                anew_publish.append((await window(anew, seconds, lambda: swapped(anew, publishing)))[0])
                prefills += [await anew.time_prefill() for _ in range(3)]
        plain = Replica(KvPolicy.RECOMPUTE, arguments.seed)
        async with plain.generating(engine_core):
            plain_without = (await window(plain, seconds, None))[0]
            plain_rate, plain_pauses = await window(plain, seconds, lambda: plainly(plain, publishing))
    finally:
        publishing.close()
    publishes = int(seconds / PUBLISH_EVERY_S)
    prefill_s = statistics.median(prefills)
    losses = [(1 - w / o) * seconds / publishes for w, o in zip(anew_publish, anew_without, strict=True)]
    floor_s = scatter_s + step_s
    ratios = [pause / floor_s for pause in pauses if pause]
    ratio, spread = median_and_spread(ratios)
    kept_share, kept_spread = median_and_spread([w / o for w, o in zip(publish, without, strict=True)])
    recompute_ratio, recompute_spread = median_and_spread([loss / prefill_s for loss in losses])
    last = kept.updater.last
    assert last is not None
    return {
        "ratio": ratio,
        "spread": spread,
        "pause_ms": 1e3 * statistics.median(pauses),
        "floor_ms": 1e3 * floor_s,
        "step_ms": 1e3 * step_s,
        "scatter_ms": 1e3 * scatter_s,
        "swap_ms": 1e3 * last.pause_s,
        "kept_share": kept_share,
        "kept_spread": kept_spread,
        "tokens_per_s": statistics.median(without),
        "recompute_ratio": recompute_ratio,
        "recompute_spread": recompute_spread,
        "recompute_share": statistics.median(w / o for w, o in zip(anew_publish, anew_without, strict=True)),
        "prefill_ms": 1e3 * prefill_s,
        "thrown_away": kept.thrown_away + anew.thrown_away,
        "num_versions": len(kept.versions | anew.versions),
        "num_changes": last.num_changes,
        "delta_bytes": last.payload_size_bytes,
        "plain_share": (plain_rate - plain.thrown_away / seconds) / plain_without,  # of tokens that were of use
        "plain_pause_ms": 1e3 * statistics.median(plain_pauses),
        "plain_thrown_away": plain.thrown_away,
        "cores": len({engine_core, other_core, publisher_core}),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="windows of 4 s, two pairs; about a minute")
    parser.add_argument("--seed", type=int, default=3)
    arguments = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    found = asyncio.run(measure(arguments))
    print(
        f"pause {found['pause_ms']:.1f} ms per swap (write {found['swap_ms']:.2f} ms); one step {found['step_ms']:.1f} ms "
        f"+ scatter {found['scatter_ms']:.2f} ms: ratio {found['ratio']:.2f} ±{found['spread']:.0%}\n"
        f"a publish every second: {found['kept_share']:.1%} ±{found['kept_spread']:.1%} of {found['tokens_per_s']:.0f} "
        f"tokens/s with kept KV, {found['recompute_share']:.1%} with recomputed KV "
        f"({found['recompute_ratio']:.2f} ±{found['recompute_spread']:.0%} of the prefill, {found['prefill_ms']:.0f} ms)\n"
        f"thrown away: {found['thrown_away']} tokens over {found['num_versions']} versions; "
        f"the plain scheme keeps {found['plain_share']:.1%}, stops for {found['plain_pause_ms']:.0f} ms "
        f"and throws {found['plain_thrown_away']} tokens away"
    )
    report(
        "weights_pause", found["pause_ms"], found["plain_pause_ms"], found.pop("ratio"), found.pop("spread"), **found
    )


if __name__ == "__main__":
    main()
