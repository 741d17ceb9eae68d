"""Makes starting checkpoints by supervised training: ``python -m services.trainer.warm_start --run-dir DIR``.

Trains on dialogues, with loss on the assistant's tokens only. Seeded and deterministic: the same recipe gives the same
bits. The checkpoint gets its name only when complete, and is made once per run directory. Independent of RL, versions
and gRPC.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog

from services.common import run_files
from services.common.config.loading import load_resolved
from services.common.config.processes import WarmStartConfig
from services.common.config.recipe import Recipe, warm_start_dir
from services.common.config.training import OptimizerConfig
from services.common.errors import ConfigError, DatasetError, RollmillError, UserError
from services.common.importing import load_object
from services.common.system.child import die_with_parent_if_asked
from services.common.system.devices import log_device
from services.common.system.machine import complete_directory, keep_freed_memory
from services.common.telemetry.logs import configure, settle
from services.common.telemetry.metrics import MetricsWriter, RowKind

if TYPE_CHECKING:
    from services.common.text.chat import Chat
    from services.trainer.model.micro_batches import Document
    from services.trainer.model.optimizer import PolicyOptimizer, Update
    from services.trainer.model.policy_model import PolicyModel
    from services.trainer.ranks import Ranks

log = structlog.get_logger()

REPORT_EVERY = 5
COMPLETE = "warm_start.json"


def make_starting_checkpoint(recipe: Recipe, policy: str, run_dir: Path) -> Path:
    """Build, train and save; returns the Hugging Face directory. Returns at once when the directory exists.

    Raises:
        ConfigError: the recipe has no warm start of this policy, or other settings made the directory.
        DatasetError: too few dialogues, or a malformed one.
    """
    config = recipe.warm_start.get(policy)
    if config is None:
        raise ConfigError(
            f"warm_start.{policy} is missing: this recipe does not say how to make its starting checkpoint"
        )
    target = warm_start_dir(run_dir, policy)
    made_by = {"seed": recipe.run.seed, **config.model_dump(mode="json")}
    if target.exists():
        path = target / COMPLETE
        if not path.exists() or json.loads(path.read_text()) != json.loads(json.dumps(made_by)):
            raise ConfigError(f"{target} was made by other warm_start settings: remove it, or start a new run")
        log.info("warm_start.reused", path=str(target))
        return target
    with complete_directory(target) as partial:
        load_object(config.builder)(partial, seed=recipe.run.seed, **config.builder_settings)
        with closing(MetricsWriter(run_files.warm_start_metrics(run_dir))) as metrics:
            if config.steps:
                _train(recipe, policy, config, partial, metrics)
        for file in partial.glob("*.safetensors"):
            file.chmod(0o644)  # their writer leaves them to their owner alone
        (partial / COMPLETE).write_text(json.dumps(made_by, indent=1))
    log.info("warm_start.done", path=str(target))
    return target


def _train(recipe: Recipe, policy_name: str, config: WarmStartConfig, directory: Path, metrics: MetricsWriter) -> None:
    import torch
    from transformers.utils import logging as transformers_logging

    from services.common.text.chat import Chat, check_model_matches, load_tokenizer
    from services.trainer.model.optimizer import PolicyOptimizer
    from services.trainer.model.policy_model import load_policy_model
    from services.trainer.ranks import Ranks

    policy = recipe.policies[policy_name]
    torch.manual_seed(recipe.run.seed)
    torch.set_num_threads(policy.trainer.threads)
    ranks = Ranks.single()
    log_device(str(ranks.device), "float32")
    tokenizer = load_tokenizer(directory)
    model = load_policy_model(directory, ranks)
    check_model_matches(model.causal_lm, tokenizer=tokenizer)
    chat = Chat(tokenizer)
    optimizer = PolicyOptimizer(
        model.named_parameters(),
        OptimizerConfig(
            lr=config.learning_rate,
            betas=config.betas,
            schedule="cosine",
            warmup_updates=int(config.warmup_share * config.steps),
            total_updates=config.steps,
            final_fraction=0.0,
        ),
    )
    dialogues = _dialogues(config, recipe.run.seed)
    for update in range(1, config.steps + 1):
        documents = [
            to_document(chat, dialogue, policy.model.context_length)
            for dialogue in islice(dialogues, config.batch_size)
        ]
        if not documents:
            raise DatasetError(f"warm_start.dialogues ran dry before update {update} of {config.steps}")
        started = time.perf_counter()
        loss, num_trained, done = supervised_update(model, optimizer, ranks, documents, policy.trainer.token_budget)
        if update % REPORT_EVERY == 0 or update in (1, config.steps):
            metrics.write(
                RowKind.WARM_START,
                policy=policy_name,
                step=update,
                steps=config.steps,
                loss=loss,
                grad_norm=done.grad_norm,
                learning_rate=done.learning_rate,
                num_trained_tokens=num_trained,
                seconds=time.perf_counter() - started,
            )
            log.info("warm_start.update", step=update, steps=config.steps, loss=round(loss, 4))
    transformers_logging.disable_progress_bar()
    model.causal_lm.save_pretrained(directory)


def supervised_update(
    model: PolicyModel, optimizer: PolicyOptimizer, ranks: Ranks, documents: Sequence[Document], max_tokens: int
) -> tuple[float, int, Update]:
    """One update by cross entropy over the trained tokens of demonstrations, by the code of the RL step.

    Returns the mean loss per trained token in nats, the number of trained tokens, and the update.
    """
    from services.trainer.model.micro_batches import forward, logprob_dtype, pack_for_ranks

    trained = sum(document.num_trained_tokens for document in documents)
    total = 0.0
    (micro_batches,) = pack_for_ranks([documents], max_tokens, ranks, logprob_dtype(model))
    for batch in micro_batches:
        logprobs, *_ = forward(model, batch, temperature=1.0)
        loss = -logprobs.sum() / max(trained, 1)
        total += float(loss.detach())
        loss.backward()
    return total, trained, optimizer.update()


def to_document(chat: Chat, dialogue: Mapping[str, Any], context_length: int) -> Document:
    """Convert a dialogue into a document: the assistant's tokens are targets, all other tokens are context.

    Raises:
        DatasetError: not a dialogue, or longer than the context.
    """
    import numpy as np

    from services.trainer.model.micro_batches import Document

    messages = dialogue.get("messages") if isinstance(dialogue, Mapping) else None
    if not isinstance(messages, list):
        raise DatasetError(f'a dialogue needs "messages": [{{"role", "content"}}, ...], got {str(dialogue)[:200]}')
    example = chat.supervised(messages, dialogue.get("tools"))
    if len(example.token_ids) > context_length:
        raise DatasetError(
            f"a dialogue has {len(example.token_ids)} tokens, more than the context ({context_length}): shorten it, "
            f"or raise model.context_length; it begins {str(messages[0])[:120]}"
        )
    return Document.supervised(np.array(example.token_ids, np.int32), np.array(example.is_assistant, np.bool_))


def _dialogues(config: WarmStartConfig, seed: int) -> Iterator[Mapping[str, Any]]:
    assert config.dialogues is not None, "checked with the recipe"
    if ":" in config.dialogues and not Path(config.dialogues).exists():
        yield from load_object(config.dialogues)(seed=seed, **config.dialogue_settings)
        return
    path = Path(config.dialogues)
    if not path.is_file():
        raise ConfigError(f"warm_start.dialogues: no file {path}, and no import path (package.module:function) either")
    rows = list(_rows(path))
    if not rows:
        raise DatasetError(f"{path} holds no dialogue")
    while True:  # repeated for as many updates as needed
        yield from rows


def _rows(path: Path) -> Iterator[Mapping[str, Any]]:
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise DatasetError(f"{path}, row {number}: not JSON: {error}") from None
            if not isinstance(row, dict):
                raise DatasetError(f"{path}, row {number}: a dialogue is an object, this is {type(row).__name__}")
            yield row


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m services.trainer.warm_start",
        description="Make the starting checkpoints of a run (recipe section warm_start) by supervised training.",
    )
    parser.add_argument("--policy", help="the policy to make it for; left out, every policy that has a warm start")
    parser.add_argument("--run-dir", type=Path, required=True, help="the run directory, which holds recipe.json")
    arguments = parser.parse_args()
    die_with_parent_if_asked()
    settle()
    keep_freed_memory()
    try:
        recipe = load_resolved(arguments.run_dir)
        policies = [arguments.policy] if arguments.policy else list(recipe.warm_start)
        threads = max(
            (recipe.policies[name].trainer.threads for name in policies if name in recipe.policies), default=1
        )
        os.environ.setdefault("OMP_NUM_THREADS", str(threads))
        configure("warm-start", arguments.run_dir)
        for name in policies:
            make_starting_checkpoint(recipe, name, arguments.run_dir)
    except RollmillError as error:
        sys.stderr.write(f"warm start: {error.message}\n")
        return 2 if isinstance(error, UserError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
