"""Makes a starting checkpoint by supervised training: ``python -m services.trainer.warm_start --run-dir DIR``.

Seeded and deterministic: the same recipe gives the same bits. The checkpoint appears under its name only when it is
complete, and is made once per run directory. It knows nothing about RL, versions or gRPC.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import structlog

from services.common.config.loading import load_resolved
from services.common.config.optimizer import OptimizerConfig
from services.common.config.recipe import Recipe, warm_start_dir
from services.common.config.services import WarmStartConfig
from services.common.errors import ConfigError, DatasetError
from services.common.importing import load_object
from services.common.logs import configure
from services.common.metrics import MetricsWriter
from services.common.process import die_with_parent_if_asked

log = structlog.get_logger()

REPORT_EVERY = 5
COMPLETE = "warm_start.json"


def make_starting_checkpoint(recipe: Recipe, run_dir: Path) -> Path:
    """Build, train and save; returns the Hugging Face directory. Does nothing when it is there already.

    Raises:
        ConfigError: the recipe has no warm start, or the directory was made by other settings.
        DatasetError: the dialogues run dry, or one is malformed.
    """
    config = recipe.warm_start
    if config is None:
        raise ConfigError("warm_start is missing: this recipe has no starting checkpoint to make")
    target = warm_start_dir(run_dir, config.policy)
    made_by = {"seed": recipe.run.seed, **config.model_dump(mode="json")}
    if target.exists():
        _check_made_by(target, made_by)
        log.info("warm_start.reused", path=str(target))
        return target
    partial = target.with_name(f"{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    load_object(config.builder)(partial, seed=recipe.run.seed, **config.builder_settings)
    _train(recipe, config, partial, MetricsWriter(run_dir / "metrics" / "warm_start.jsonl"))
    (partial / COMPLETE).write_text(json.dumps(made_by, indent=1))
    partial.rename(target)
    log.info("warm_start.done", path=str(target))
    return target


def _train(recipe: Recipe, config: WarmStartConfig, directory: Path, metrics: MetricsWriter) -> None:
    import torch

    from services.common.chat import Chat
    from services.common.models import load_tokenizer
    from services.trainer.model import load_policy_model
    from services.trainer.optimizer import PolicyOptimizer
    from services.trainer.packing import Document
    from services.trainer.sharding import Ranks
    from services.trainer.supervised import SupervisedStep

    policy = recipe.policies[config.policy]
    torch.manual_seed(recipe.run.seed)
    ranks = Ranks.single()
    chat = Chat(load_tokenizer(directory))
    model = load_policy_model(directory, ranks)
    optimizer = PolicyOptimizer(
        model.named_parameters(),
        OptimizerConfig(
            lr=config.learning_rate,
            betas=config.betas,
            schedule="cosine",
            total_updates=config.steps,
            final_fraction=0.0,
        ),
    )
    step = SupervisedStep(model, optimizer, ranks, max_tokens_per_micro_batch=policy.trainer.token_budget)
    dialogues = _dialogues(config, recipe.run.seed)
    for update in range(1, config.steps + 1):
        documents = []
        for dialogue in islice(dialogues, config.batch_size):
            example = chat.supervised(_messages(dialogue), dialogue.get("tools"))
            if len(example.token_ids) > policy.model.context_length:
                raise DatasetError(
                    f"a dialogue has {len(example.token_ids)} tokens, more than the context of {config.policy} "
                    f"({policy.model.context_length}): shorten it or raise policies.{config.policy}.model.context_length"
                )
            documents.append(Document.supervised(_ints(example.token_ids), _bools(example.is_assistant)))
        if not documents:
            raise DatasetError(f"warm_start.dialogues ran dry before update {update} of {config.steps}")
        done = step.run(documents)
        if update % REPORT_EVERY == 0 or update in (1, config.steps):
            metrics.write(
                "warm_start",
                step=update,
                steps=config.steps,
                loss=done.loss,
                grad_norm=done.grad_norm,
                learning_rate=done.learning_rate,
                num_trained_tokens=done.num_trained_tokens,
                seconds=done.seconds,
            )
            log.info("warm_start.update", step=update, steps=config.steps, loss=round(done.loss, 4))
    model.causal_lm.save_pretrained(directory)


def _dialogues(config: WarmStartConfig, seed: int) -> Iterator[Mapping[str, Any]]:
    if ":" in config.dialogues and not Path(config.dialogues).exists():
        yield from load_object(config.dialogues)(seed=seed, **config.dialogue_settings)
        return
    path = Path(config.dialogues)
    if not path.is_file():
        raise ConfigError(f"warm_start.dialogues: no file {path}, and no import path (package.module:function) either")
    while True:  # as many passes as the updates need
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                try:
                    yield json.loads(line)
                except json.JSONDecodeError as error:
                    raise DatasetError(f"{path}, row {number}: not JSON: {error}") from None


def _messages(dialogue: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    messages = dialogue.get("messages")
    if not isinstance(messages, list):
        raise DatasetError(f'a dialogue needs "messages": [{{"role", "content"}}, ...]; it has {sorted(dialogue)}')
    return messages


def _ints(values: tuple[int, ...]) -> Any:
    import numpy as np

    return np.asarray(values, dtype=np.int32)


def _bools(values: tuple[bool, ...]) -> Any:
    import numpy as np

    return np.asarray(values, dtype=np.bool_)


def _check_made_by(target: Path, made_by: Mapping[str, Any]) -> None:
    path = target / COMPLETE
    if not path.exists() or json.loads(path.read_text()) != json.loads(json.dumps(made_by)):
        raise ConfigError(f"{target} was made by other warm_start settings: remove it, or start a new run")


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m services.trainer.warm_start",
        description="Make the starting checkpoint of a run (recipe section warm_start) by supervised training.",
    )
    parser.add_argument("--run-dir", type=Path, required=True, help="the run directory, which holds recipe.json")
    arguments = parser.parse_args()
    die_with_parent_if_asked()
    recipe = load_resolved(arguments.run_dir)
    if recipe.warm_start is not None:
        threads = recipe.policies[recipe.warm_start.policy].trainer.threads
        os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    configure("warm-start", arguments.run_dir)
    make_starting_checkpoint(recipe, arguments.run_dir)


if __name__ == "__main__":
    main()
