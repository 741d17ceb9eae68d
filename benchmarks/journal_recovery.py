"""Measures the losses of a journal with damaged segments, its recovery time and its size.

* segments: each is cut, and one of its bits flipped, at 200 places (with --quick 60).
  Records that hold the changed bytes are damaged; ``lost_records`` counts those beyond, ``starts_refused`` starts that
  failed.
* restart: the orchestrator itself, in a process of its own, on the journal of a million trajectories (with --quick
  100,000, and their time beyond an empty run's is scaled): until the first answer.
  Other load of the machine is in the seconds; ``cpu_s`` are those of the process alone.
* size: bytes per token on disk, of trajectories of 1,000 and 16,384 tokens (Zipf-like ids of a
  vocabulary of 150,000, float32 log-probabilities), and processor time per token to write and read one, against plain
  JSON lists.

    python benchmarks/journal_recovery.py [--quick] [--seed 7]
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import random
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import structlog
import xxhash

from benchmarks._bench import free_port, kill, orchestrator, report_facts, tree_cpu_s
from benchmarks._journal_million import write_million
from services.common.errors import RollmillError
from services.common.records import Segment, StopReason, TokenSequence, Trajectory
from services.orchestrator.journal import entries
from services.orchestrator.journal.journal import Journal
from services.orchestrator.journal.reader import JournalReader
from services.orchestrator.journal.segments import (
    Packer,
    Unpacker,
    checksum_of,
    segment_path,
    sizes_in,
    write_header,
)

MILLION = 1_000_000
VOCABULARY = 150_000
KINDS = ("alpha", "beta", "gamma")
NUM_RECORDS = 90
RESTART_DEADLINE_S = 240.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="at most a minute")
    parser.add_argument("--seed", type=int, default=7)
    options = parser.parse_args()
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL)
    )  # thousands of damages are named
    num_places = 60 if options.quick else 200
    num_restarted = 100_000 if options.quick else MILLION
    left_out = {}
    if options.quick:
        left_out["a million trajectories"] = f"--quick: {num_restarted} are restarted, seconds are scaled"
        left_out["200 places"] = f"--quick: {num_places} per segment"
    with tempfile.TemporaryDirectory(prefix="rollmill-bench-") as scratch:
        trial = Trial()
        asyncio.run(damage_segments(Path(scratch) / "segments", trial, num_places, options.seed))
        sizes = {
            f"{length}": asyncio.run(measure_size(Path(scratch) / f"size-{length}", length, count, options.seed))
            for length, count in ((1000, 200), (16_384, 12))
        }
        empty = measure_restart(Path(scratch) / "empty", 0, options.seed)
        restart = measure_restart(Path(scratch) / "restart", num_restarted, options.seed)
    scale = MILLION / num_restarted
    scaled = {
        key: empty[key] + scale * (restart[key] - empty[key]) for key in restart if key.endswith("_s") or key == "s"
    }
    print(
        f"{trial.starts} starts, {trial.refused} refused, {trial.lost} records lost beyond the {trial.damaged} damaged; "
        f"restart with {num_restarted} trajectories: {restart['s']:.1f} s"
    )
    report_facts(
        "journal_recovery",
        lost_records=trial.lost, starts_refused=trial.refused, untold_records=trial.untold, starts=trial.starts,
        damaged_records=trial.damaged, places=num_places,
        restart_s_million=max(scaled["s"], scaled["cpu_s"]), restart_cpu_s_million=scaled["cpu_s"],
        restart_s_empty=empty["s"],
        restart_trajectories=num_restarted, rss_mb=restart["rss_mb"],
        bytes_per_token=max(size["bytes"] for size in sizes.values()), sizes=sizes, seed=options.seed, left_out=left_out,
    )  # fmt: skip


class Trial:
    """Counts the findings of starts after damage."""

    def __init__(self) -> None:
        self.starts = self.refused = self.lost = self.damaged = self.untold = 0

    def start(self, directory: Path, expected: set[str], damaged: set[str]) -> None:
        """Open the journal as a start does. ``damaged`` are keys of records with changed bytes."""
        self.starts += 1
        self.damaged += len(damaged)
        try:
            journal = Journal(directory)
        except (RollmillError, OSError, ValueError):
            self.refused += 1
            return
        with closing(journal.reader) as reader:
            found = [row.key for row in reader.rows() if reader.load(row) is not None]
            told = len(reader.damage()) + len(reader.gaps())
        gone = expected - set(found)
        self.lost += len(gone - damaged) + len(found) - len(set(found))
        self.untold += bool(gone) and not told


def change(path: Path, how: Callable[[bytes], bytes]) -> None:
    path.write_bytes(how(path.read_bytes()))


# --- the segments ----------------------------------------------------------------------------------------------------


async def damage_segments(directory: Path, trial: Trial, num_places: int, seed: int) -> None:
    """Each segment cut, and flipped, at places over its whole length."""
    run = directory / "run"
    await write(run, 0, NUM_RECORDS)
    draw = random.Random(seed)
    with closing(JournalReader(run)) as reader:
        rows = list(reader.rows())
    expected = {row.key for row in rows}
    for kind, segment in sizes_in(run):
        mine = sorted((row for row in rows if (row.kind, row.segment) == (kind, segment)), key=lambda row: row.offset)
        ends = [row.offset + row.length for row in mine]
        begins = [0, *ends[:-1]]
        for number in range(num_places):
            at = min(ends[-1] - 1, int((number + draw.random()) / num_places * ends[-1]))
            bit = 1 << draw.randrange(8)
            flip = {row.key for row, begin, end in zip(mine, begins, ends, strict=True) if begin <= at < end}
            cut = {row.key for row, end in zip(mine, ends, strict=True) if end > at}
            ways: tuple[tuple[Callable[[bytes], bytes], set[str]], ...] = (
                (lambda data, at=at, bit=bit: data[:at] + bytes([data[at] ^ bit]) + data[at + 1 :], flip),
                (lambda data, at=at: data[:at], cut),
            )
            for how, damaged in ways:
                copy = directory / "copy"
                shutil.copytree(run, copy)
                change(segment_path(copy, kind, segment), how)
                trial.start(copy, expected, damaged)
                shutil.rmtree(copy)


async def write(directory: Path, first: int, count: int) -> None:
    journal = Journal(directory)
    journal.start()
    await put(journal, range(first, first + count))
    await journal.close()


async def put(journal: Journal, numbers: range) -> None:
    await asyncio.gather(
        *(journal.append(KINDS[n % len(KINDS)], f"k{n}", {"n": n, "text": "word " * (n % 40)}) for n in numbers)
    )


# --- the size --------------------------------------------------------------------------------------------------------


async def measure_size(directory: Path, num_tokens: int, count: int, seed: int) -> dict[str, float]:
    """Bytes on disk per token, and nanoseconds of processor time per token to write and read a trajectory's line."""
    draw = np.random.default_rng(seed)
    made = [trajectory(number, num_tokens, draw) for number in range(count)]
    tokens = num_tokens * count
    journal = Journal(directory)
    journal.start()
    await asyncio.gather(*(journal.append(entries.TRAJECTORY, f"g/{t.index}", t) for t in made))
    await journal.close()
    size = bytes_in(directory)
    packer, unpacker = Packer(), Unpacker()

    def write_ours(t: Trajectory) -> bytes:
        payload = packer.pack(orjson.dumps(entries.to_json(t)) + b"\n")
        checksum_of(payload)
        return write_header(1, 1.0, "g/1", payload) + payload

    def write_plain(t: Trajectory) -> bytes:
        line = orjson.dumps(plain(t), option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE)
        xxhash.xxh3_64_intdigest(line)
        return line

    skip = len(write_header(1, 1.0, "g/1", b""))
    ours, plain_lines = [write_ours(t) for t in made], [write_plain(t) for t in made]
    timed = {
        "write_ns": lambda: [write_ours(t) for t in made],
        "plain_write_ns": lambda: [write_plain(t) for t in made],
        "read_ns": lambda: [
            entries.from_json(Trajectory, orjson.loads(unpacker.unpack(data[skip:])))
            for data in ours
            if checksum_of(data[skip:])
        ],
        "plain_read_ns": lambda: [
            read_plain(orjson.loads(line)) for line in plain_lines if xxhash.xxh3_64_intdigest(line)
        ],
    }
    return {
        "bytes": size / tokens,
        "plain_bytes": sum(map(len, plain_lines)) / tokens,
        **{name: 1e9 * min(processor_s(run) for _ in range(3)) / tokens for name, run in timed.items()},
    }


def bytes_in(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.iterdir())


def processor_s(run: Callable[[], object]) -> float:
    began = time.process_time()
    run()
    return time.process_time() - began


def trajectory(index: int, num_tokens: int, draw: np.random.Generator) -> Trajectory:
    """A tenth is prompt; log-probabilities of which six in ten are of nearly certain tokens."""
    prompt = num_tokens // 10
    ids, count = zipf(draw, num_tokens), num_tokens - prompt
    certain = -(10 ** draw.uniform(-6, -1, count))
    logprobs = np.where(draw.random(count) < 0.6, certain, -draw.exponential(1.0, count)).astype(np.float32)
    segments = (Segment.environment(ids[:prompt]), Segment.policy(ids[prompt:], logprobs, 3))
    sequence = TokenSequence(policy="model0", segments=segments, reward=0.0, stop_reason=StopReason.STOP)
    return Trajectory(task_group_id="g", index=index, sequences=(sequence,), reward=0.0, replica_id="a")


def zipf(draw: np.random.Generator, count: int) -> Any:
    """[count] int32: rank r has a chance of 1 / r; frequent tokens have low ids, as in byte-pair vocabularies."""
    ranks = np.exp(draw.random(count) * np.log(VOCABULARY)).astype(np.int64)
    few = 2000
    order = np.random.default_rng(0)
    ids = np.concatenate([order.permutation(few), few + order.permutation(VOCABULARY - few)])
    return ids[np.minimum(ranks - 1, VOCABULARY - 1)].astype(np.int32)


def plain(t: Trajectory) -> Mapping[str, Any]:
    """The line with lists of numbers."""
    line = entries.to_json(t)
    for sequence, kept in zip(t.sequences, line["sequences"], strict=True):
        for segment, written in zip(sequence.segments, kept["segments"], strict=True):
            written |= {
                "token_ids": segment.token_ids, "logprobs": segment.logprobs,
                "teacher_logprobs": segment.teacher_logprobs,
            }  # fmt: skip
    return line


def read_plain(line: Mapping[str, Any]) -> list[Any]:
    return [
        (np.array(s["token_ids"], np.int32), np.array(s["logprobs"], np.float32))
        for sequence in line["sequences"]
        for s in sequence["segments"]
    ]


# --- the restart -----------------------------------------------------------------------------------------------------


def measure_restart(run_dir: Path, num_trajectories: int, seed: int) -> dict[str, float]:
    """Seconds from the start of the process to its first answer, and its largest resident memory."""
    port = free_port()
    began = time.perf_counter()
    num_records = write_million(run_dir, num_trajectories, port, seed)
    print(f"{num_records} records written in {time.perf_counter() - began:.0f} s", flush=True)
    seconds, cpu, rss = restart(run_dir, port)
    return {"s": seconds, "cpu_s": cpu, "rss_mb": rss}


def restart(run_dir: Path, port: int) -> tuple[float, float, float]:
    """Seconds, seconds of processor time, and MB."""
    began = time.perf_counter()
    process = orchestrator(str(run_dir))
    try:
        while not answers(port):
            assert process.poll() is None, "the orchestrator did not start"
            assert time.perf_counter() - began < RESTART_DEADLINE_S, "the orchestrator does not answer"
            time.sleep(0.02)
        return time.perf_counter() - began, tree_cpu_s(process.pid), peak_mb(process)
    finally:
        kill([process])


def answers(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=1.0):
            return True
    except OSError:
        return False


def peak_mb(process: subprocess.Popen[bytes]) -> float:
    status = Path(f"/proc/{process.pid}/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


if __name__ == "__main__":
    main()
