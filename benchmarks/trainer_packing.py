"""Trained tokens per second: packed micro-batches (ours) against padded ones (theirs), forward and backward.

Same model and weights, same sequences, same number of threads, same budget of tokens per micro-batch (padding counts
towards this limit, because they take the memory), same loss (the mean log-probability of the response tokens) through
the same chunked head over the response tokens only, same norms. So the ratio shows the gain of packing and its
attention alone.

* ours: first-fit decreasing, documents end to end, attention per document.
* theirs: rows in random order, right-padded to the longest of their micro-batch, transformers' sdpa attention with an
  attention mask.
* theirs, sorted: the same with rows sorted by length first, the best that padding can do; reported beside the ratio.

Then groups: eight documents of each prompt, with the prompt computed once for the group and once for each document.
Only the prompt is shared: responses are drawn token by token, so no two begin alike. Key ``groups``.

Prompts and responses are those of ``engine_throughput.py``. Only real tokens count. Each repetition runs every arm in
turn; the loss of all arms must agree.

    python benchmarks/trainer_packing.py [--quick] [--threads 1] [--seed 7]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from benchmarks._report import median_and_spread, report
from benchmarks._workload import MODELS, Workload
from services.trainer.data import packing
from services.trainer.data.packing import Document, pack
from services.trainer.model.logprobs import token_logprobs
from services.trainer.model.policy_model import build_policy_model, speed_up_norms
from services.trainer.ranks.sharding import Ranks
from services.trainer.step.micro_batches import forward, pack_for_ranks

MAX_TOKENS = 4096
GROUP = 8
Step = Callable[[], float]  # forward and backward over all sequences; the loss


def build_model(name: str, seed: int) -> Any:
    torch.manual_seed(seed)
    config = Qwen3Config(tie_word_embeddings=True, max_position_embeddings=4096, **MODELS[name])
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa").train()


def draw_documents(workload: Workload, vocab_size: int, seed: int) -> list[Document]:
    prompts, lengths = workload.draw(vocab_size, seed)
    random = np.random.default_rng(seed + 1)
    return [
        Document.supervised(
            np.concatenate([prompt, random.integers(0, vocab_size, length)]).astype(np.int32),
            np.arange(len(prompt) + length) >= len(prompt),
        )
        for prompt, length in zip(prompts, lengths, strict=True)
    ]


def draw_groups(workload: Workload, vocab_size: int, seed: int) -> list[Document]:
    """``GROUP`` documents for each prompt; as many documents as the workload has requests."""
    alone, random = draw_documents(workload, vocab_size, seed), np.random.default_rng(seed + 2)
    prompts = [d.token_ids[~d.loss_mask] for d in alone[::GROUP]]
    documents = []
    for index, document in enumerate(alone):
        ids = np.concatenate([prompts[index // GROUP], document.token_ids[document.loss_mask]])
        mask = np.arange(len(ids)) >= len(prompts[index // GROUP])
        documents.append(Document.supervised(ids.astype(np.int32), mask))
    return [documents[i] for i in random.permutation(len(documents))]


@contextmanager
def sharing(share: bool) -> Iterator[None]:
    """Whether documents with a shared prefix are packed so that the prefix is computed once."""
    least = packing.WORTHWHILE
    packing.WORTHWHILE = least if share else 2.0  # no document shares more than all of its tokens
    try:
        yield
    finally:
        packing.WORTHWHILE = least


def packed(model: Any, documents: list[Document]) -> Step:
    policy = build_policy_model(model, Ranks.single())
    trained = sum(d.num_trained_tokens for d in documents)

    def step() -> float:
        total = 0.0
        for batch in pack_for_ranks([documents], MAX_TOKENS, Ranks.single(), torch.float32)[0]:
            loss = -forward(policy, batch, 1.0)[0].sum() / trained
            loss.backward()
            total += loss.item()
        policy.zero_grad(set_to_none=True)
        return total

    return step


def padded(model: Any, documents: list[Document], order: list[int]) -> Step:
    speed_up_norms(model, torch.device("cpu"))  # as in our arm, so that the ratio does not include it
    trained = sum(d.num_trained_tokens for d in documents)
    batches: list[list[Document]] = [[]]
    for document in (documents[i] for i in order):
        rows = [*batches[-1], document]
        if batches[-1] and len(rows) * max(d.num_tokens for d in rows) > MAX_TOKENS:
            rows = [document]
            batches.append(rows)
        batches[-1] = rows

    def step() -> float:
        total = 0.0
        for rows in batches:
            width = max(d.num_tokens for d in rows)
            token_ids = torch.zeros(len(rows), width, dtype=torch.int64)
            present, mask = torch.zeros_like(token_ids), torch.zeros(len(rows), width, dtype=torch.bool)
            for row, document in enumerate(rows):
                token_ids[row, : document.num_tokens] = torch.as_tensor(document.token_ids)
                mask[row, : document.num_tokens] = torch.as_tensor(document.loss_mask)
                present[row, : document.num_tokens] = 1
            hidden = model.model(input_ids=token_ids, attention_mask=present, use_cache=False).last_hidden_state
            targets = mask[:, 1:]
            logprobs, _ = token_logprobs(hidden[:, :-1][targets], model.lm_head.weight, token_ids[:, 1:][targets])
            loss = -logprobs.sum() / trained
            loss.backward()
            total += loss.item()
        model.zero_grad(set_to_none=True)
        return total

    return step


def compare(model_name: str, workload: Workload, seed: int, repetitions: int) -> dict[str, Any]:
    documents = draw_documents(workload, MODELS[model_name]["vocab_size"], seed)
    num_tokens = sum(d.num_tokens for d in documents)
    at_random = np.random.default_rng(seed).permutation(len(documents)).tolist()
    by_length = sorted(range(len(documents)), key=lambda i: documents[i].num_tokens)
    arms = {
        "ours": packed(build_model(model_name, seed), documents),
        "theirs": padded(build_model(model_name, seed), documents, at_random),
        "theirs_sorted": padded(build_model(model_name, seed), documents, by_length),
    }
    packed(build_model(model_name, seed), documents[:2])()  # first calls pay for allocations and lazy imports
    padded(build_model(model_name, seed), documents[:2], [0, 1])()
    speeds: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(repetitions):
        losses = []
        for name, step in arms.items():
            started = time.perf_counter()
            losses.append(step())
            speeds[name].append(num_tokens / (time.perf_counter() - started))
        assert max(losses) - min(losses) < 1e-4 * abs(losses[0]), f"the arms disagree: {losses}"
    ratios = {
        name: median_and_spread([a / b for a, b in zip(speeds["ours"], speeds[name], strict=True)])
        for name in ("theirs", "theirs_sorted")
    }
    medians = {name: median_and_spread(values)[0] for name, values in speeds.items()}
    ratio, spread = ratios["theirs"]
    print(
        f"{model_name:11s} ours {medians['ours']:7.0f}  padded {medians['theirs']:7.0f}  "
        f"padded, sorted {medians['theirs_sorted']:7.0f} tokens/s  ratio {ratio:.2f} ±{spread:.0%}"
    )
    return {
        "model": model_name, "workload": str(workload), "tokens": num_tokens, **medians, "ratio": ratio,
        "spread": spread, "ratio_to_sorted": ratios["theirs_sorted"][0], "repetitions": repetitions,
    }  # fmt: skip


def compare_groups(model_name: str, workload: Workload, seed: int, repetitions: int) -> dict[str, Any]:
    documents = draw_groups(workload, MODELS[model_name]["vocab_size"], seed)
    num_tokens = sum(d.num_tokens for d in documents)
    step = packed(build_model(model_name, seed), documents)
    cpu: dict[bool, list[float]] = {True: [], False: []}
    losses, computed = {}, {}
    for repetition in range(repetitions + 1):  # the first pays for allocations
        for share, seconds in cpu.items():
            with sharing(share):
                computed[share] = sum(batch.num_tokens for batch in pack(documents, MAX_TOKENS))
                started = time.process_time()
                losses[share] = step()
                if repetition:
                    seconds.append(time.process_time() - started)
    assert abs(losses[True] - losses[False]) < 1e-4 * abs(losses[False]), f"the arms disagree: {losses}"
    ratio, spread = median_and_spread([b / a for a, b in zip(cpu[True], cpu[False], strict=True)])
    shared, unshared = (num_tokens / median_and_spread(cpu[share])[0] for share in (True, False))
    print(
        f"{model_name:11s} groups of {GROUP}: shared {shared:7.0f}  unshared {unshared:7.0f} tokens per CPU second  "
        f"ratio {ratio:.2f} ±{spread:.0%}  computed {computed[True]:,} of {num_tokens:,} tokens"
    )
    return {
        "model": model_name, "tokens": num_tokens, "computed_shared": computed[True],
        "computed_unshared": computed[False], "shared": shared, "unshared": unshared, "ratio": ratio, "spread": spread,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="fewer sequences: at most 60 s")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--repetitions", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    num_requests, repetitions = (48, 2) if options.quick else (128, options.repetitions)
    workload = Workload(name="log-normal", num_requests=num_requests, median=96, sigma=1.0, longest=1024)
    results = [compare(name, workload, options.seed, repetitions) for name in MODELS]
    short = Workload(name="groups", num_requests=num_requests, median=32, sigma=1.0, longest=1024)
    groups = [compare_groups(name, short, options.seed, repetitions) for name in MODELS]
    head = results[0]
    report(
        "trainer_packing", head["ours"], head["theirs"], head["ratio"], head["spread"],
        unit="tokens/s, forward and backward", seed=options.seed, threads=options.threads, max_tokens=MAX_TOKENS,
        targets={"log-normal": 1.8}, workloads=results, groups=groups,
    )  # fmt: skip


if __name__ == "__main__":
    main()
