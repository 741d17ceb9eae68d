"""The cost of SGLang's client in the inference service: CPU microseconds per chunk of 16 tokens.

A scripted server (``_scripted_sglang.py``) in a process of its own streams tokens without computing them. The engine's
process reads them as in a run: one stream per request, chunks checked and collected. CPU seconds of the engine's process
only. ``busy_at_8_gpus`` is the share of its event loop at 3,750 chunks per second: eight GPUs with 7,500 tokens/s each.

    python benchmarks/sglang_client.py [--quick] [--requests 64]
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks._report import report_facts
from benchmarks._scripted_sglang import CHUNK_TOKENS
from services.common.records import Sampling
from services.inference.engine.base import GenerationRequest, KvPolicy
from services.inference.engine.served.engine import ServedEngine
from services.inference.engine.served.fleet import DiskTransfer, Server
from services.inference.engine.served.process import ServerCommand, ServerProcess
from services.inference.engine.served.stage import Stage
from services.inference.engine.sglang import sglang_program

_SCRIPT = Path(__file__).with_name("_scripted_sglang.py")
_CHUNKS_PER_S = 3750.0
_TOKENS = 1024  # of each request
_REPEATS = 3


def build(directory: Path, slots: int) -> ServedEngine:
    """An engine over one scripted server."""
    stage = Stage(directory / "stage", {"model.norm.weight": np.ones(8, np.float32)}, 0)
    command = ServerCommand(
        name="sglang-scripted",
        argv=(sys.executable, str(_SCRIPT), "--token-s", "0.02"),
        program=sglang_program(["cpu"]),
    )
    process = ServerProcess(command, directory / "scripted.log", 60.0)
    return ServedEngine(
        [Server(process, KvPolicy.RECOMPUTE)],
        stage,
        DiskTransfer(stage),
        context_length=2 * _TOKENS,
        vocab_size=1000,
        kv_policy=KvPolicy.RECOMPUTE,
        chunk_tokens=CHUNK_TOKENS,
    )


async def microseconds(num_requests: int, directory: Path) -> list[float]:
    """CPU microseconds per chunk, of each repetition."""
    engine = build(directory, num_requests)
    await engine.start()
    found = []
    try:
        for repeat in range(_REPEATS + 1):
            requests = [
                GenerationRequest(
                    request_id=f"{repeat}-{number}",
                    prompt_ids=(1, 2, 3),
                    sampling=Sampling(max_new_tokens=_TOKENS),
                    stop_token_ids=(),
                    seed=0,
                )
                for number in range(num_requests)
            ]
            began = time.process_time()
            answers = await asyncio.gather(*(engine.generate(request) for request in requests))
            taken = time.process_time() - began
            assert all(len(answer.token_ids) == _TOKENS for answer in answers)
            if repeat:  # the first one opens connections
                found.append(1e6 * taken / (num_requests * _TOKENS / CHUNK_TOKENS))
    finally:
        await engine.stop()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="16 requests at once")
    parser.add_argument("--requests", type=int, default=64, help="at once")
    arguments = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="rollmill-sglang-"))
    try:
        found = asyncio.run(microseconds(16 if arguments.quick else arguments.requests, directory))
    finally:
        shutil.rmtree(directory)
    best = min(found)
    print(f"{best:.0f} µs of CPU per chunk of {CHUNK_TOKENS} tokens")
    report_facts("sglang_client", us_per_chunk=best, us_per_chunk_all=found, busy_at_8_gpus=best * _CHUNKS_PER_S / 1e6)


if __name__ == "__main__":
    main()
