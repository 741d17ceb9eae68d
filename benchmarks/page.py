"""Measures the answers of ``rollmill page`` with a run of 100,000 trajectories, in a real browser (Chromium, headless).

Writes a run directory (real journal, two turns of a policy with a tool result each), serves it by the command in a process
of its own, waits until its journal is indexed, and then does what a person does, many times: opens every view, searches
words, filters by task, step, reward, length and fate, sorts, goes through conversations by key, and to the next page.

    p95_ms            95th percentile over interactions, from the key or the address to the drawn result
    request_p95_ms    the same of the requests of the page, as the browser measures them
    slowest           the slowest kind of interaction and its median
    server_cpu_ms     by kind, the median of the processor time of the server, which no other process lengthens
    errors            exceptions, errors of the console, failed requests
    indexed_s         seconds from the start of the command until everything is indexed and can be searched
    memory_mb         resident memory of the server at the end

About two minutes on two cores; ``--quick`` has 10,000 trajectories. Without chromium nothing is measured.

    python benchmarks/page.py [--quick] [--trajectories 100000] [--rounds 6]
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable
from pathlib import Path

import aiohttp
import numpy as np

from benchmarks._bench import report_facts, report_nothing
from benchmarks._page_run import GROUP_SIZE, write_run
from services.common.system.machine import free_ports
from tests.chromium import Page, browser
from tests.needs import installed
from tests.unit.inference.fakes import qwen_like_tokenizer

ROOT = Path(__file__).resolve().parent.parent
START_S = 60.0
INDEX_S = 400.0
VIEWS = {"now": ".ring", "curves": "figure path.line", "fates": ".column", "weights": "td", "events": ".event"}


class Person:
    """Does things in the page and measures them."""

    def __init__(self, page: Page, server: int) -> None:
        """``server``: the process id of the server."""
        self._page = page
        self._server_clock = (~server << 3) | 2  # as clock_getcpuclockid(3) makes it
        self.ms: dict[str, list[float]] = defaultdict(list)
        self.server_cpu_ms: dict[str, list[float]] = defaultdict(list)

    async def timed(self, what: str, act: Callable[[], Awaitable[object]], shown: str) -> None:
        """From the act until what it wants is drawn: seen after the next frame."""
        began, spent = time.perf_counter(), time.clock_gettime(self._server_clock)
        await act()
        await self._page.until(shown)
        await self._page.run("new Promise((done) => requestAnimationFrame(() => done(1)))")
        self.ms[what].append(1000 * (time.perf_counter() - began))
        self.server_cpu_ms[what].append(1000 * (time.clock_gettime(self._server_clock) - spent))

    async def goes(self, what: str, hash_: str, shown: str) -> None:
        await self.timed(what, lambda: self._page.run(f"void (location.hash = {hash_!r})"), shown)

    async def looks_round(self) -> None:
        for view, shown in VIEWS.items():
            await self.goes(f"view {view}", f"#/{view}", f"document.querySelector('.view.{view} {shown}')")

    async def filters(self, query: str, what: str) -> None:
        await self.goes(
            what, f"#/rollouts?{query}", f"document.querySelector('.view.rollouts')?.dataset.listed === {query!r}"
        )

    async def reads(self, count: int) -> None:
        for _ in range(count):
            before = await self._page.run("document.querySelector('.about')?.dataset.number ?? ''")
            shown = f"(document.querySelector('.about')?.dataset.number ?? '') !== {before!r} && document.querySelector('.turn.policy .tokens span')"
            await self.timed("next conversation", lambda: self._page.key("j"), shown)


async def _measure(
    address: str, server: int, rounds: int, random: np.random.Generator
) -> tuple[Person, list[float], list[str]]:
    async with browser() as page:
        await page.size(1280, 900)
        await page.open(address)
        await page.until("document.querySelector('.ring')")
        person = Person(page, server)
        for _ in range(rounds):
            await person.looks_round()
            number = int(random.integers(1000))
            await person.filters(f"task=mill-{number:04d}", "filter by task")
            await person.filters(f"step={int(random.integers(1, 60))}", "filter by step")
            await person.filters("min_reward=0.5&min_tokens=100", "filter by reward and length")
            await person.filters("fate=equal_rewards&order=-tokens", "filter by fate, sorted")
            await person.filters(f"words=grinds+{int(random.integers(100, 999))}", "search words")
            await person.filters("words=sacks", "search a word of all")
            await person.filters("words=sacks&min_reward=0.5&order=tokens", "search, filter and sort")
            await person.filters("order=reward", "sort all by reward")
            await person.reads(5)
        requests = await page.run(
            "performance.getEntriesByType('resource').filter((one) => one.name.includes('/api/')).map((one) => one.duration)"
        )
        return person, requests, page.errors


async def _indexed(address: str, process: asyncio.subprocess.Process, rollouts: int) -> None:
    """Waits until the journal is indexed, texts included."""
    async with asyncio.timeout(INDEX_S), aiohttp.ClientSession() as session:
        while process.returncode is None:
            try:
                async with session.get(f"{address}api/runs/0/facets") as answer:
                    found = await answer.json()
                    if found["complete"] and found["texts_searched"] and found["indexed"] == rollouts:
                        return
            except aiohttp.ClientConnectionError:
                pass  # not listening yet
            await asyncio.sleep(0.2)
    raise RuntimeError(f"the page's server ended with {process.returncode}")


def _memory_mb(pid: int) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS"))


async def _run(options: argparse.Namespace, folder: Path) -> None:
    qwen_like_tokenizer().save_pretrained(folder / "tokenizer")
    write_run(folder / "run", options.trajectories, folder / "tokenizer")
    (port,) = free_ports(1)
    address = f"http://127.0.0.1:{port}/"
    began = time.perf_counter()
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "services.cli", "page", str(folder / "run"), "--port", str(port), cwd=ROOT
    )
    try:
        await _indexed(address, process, options.trajectories // GROUP_SIZE * GROUP_SIZE)
        indexed_s = time.perf_counter() - began
        person, requests, errors = await _measure(address, process.pid, options.rounds, np.random.default_rng(7))
        memory = _memory_mb(process.pid)
    finally:
        if process.returncode is None:
            process.terminate()
        async with asyncio.timeout(START_S):
            await process.wait()
    medians = {what: statistics.median(values) for what, values in person.ms.items()}
    slowest = max(medians, key=medians.__getitem__)
    every = [value for values in person.ms.values() for value in values]
    for error in errors:
        print(error)
    report_facts(
        "page",
        trajectories=options.trajectories,
        interactions=len(every),
        p95_ms=float(np.percentile(every, 95)),
        median_ms=statistics.median(every),
        request_p95_ms=float(np.percentile(requests, 95)),
        requests=len(requests),
        slowest={slowest: medians[slowest]},
        medians_ms=medians,
        server_cpu_ms={what: statistics.median(values) for what, values in person.server_cpu_ms.items()},
        errors=len(errors),
        indexed_s=indexed_s,
        memory_mb=memory,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="10,000 trajectories and two rounds")
    parser.add_argument("--trajectories", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=6)
    options = parser.parse_args()
    if options.quick:
        options.trajectories, options.rounds = 10_000, 2
    if installed("chromium") is None:
        report_nothing("page", "there is no chromium (apt-get install chromium)")
        return
    with tempfile.TemporaryDirectory(prefix="rollmill-page-") as folder:
        asyncio.run(_run(options, Path(folder)))


if __name__ == "__main__":
    main()
