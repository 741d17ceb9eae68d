"""A tiny Hugging Face directory, a recipe that trains the model, and the batches of its run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from services.common.config.loading import validate
from services.common.config.recipe import Recipe
from services.common.records import RankBatch, WeightVersion
from services.common.weights.snapshot import tensor_digest
from services.trainer.publish import Published
from services.trainer.step import TrainStep
from tests.unit.trainer.building import VOCAB, rank_batch, tiny_causal_lm, training_sequences

POLICY = "model0"
CHAT_TEMPLATE = (
    "{%- for message in messages -%}<|im_start|>{{ message.role }} {{ message.content }}<|im_end|>{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|im_start|>assistant {% endif -%}"
)
WORDS = ["user", "assistant", "tool", "What", "is", "one", "two", "three", "plus", "equals"]


def save_tokenizer(directory: Path, vocabulary: int = VOCAB) -> None:
    """A tokenizer of words with a chat template."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<|im_start|>", "<|im_end|>", "<unk>"]
    names = [*special, *WORDS, *(f"w{i}" for i in range(vocabulary - len(special) - len(WORDS)))]
    tokenizer = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        unk_token="<unk>",
        additional_special_tokens=special[:1],
        chat_template=CHAT_TEMPLATE,
    ).save_pretrained(directory)


def save_model(directory: Path, *, vocabulary: int = VOCAB, **settings: Any) -> Path:
    """Random weights and a tokenizer."""
    directory.mkdir(parents=True, exist_ok=True)
    tiny_causal_lm(**settings).save_pretrained(directory)
    save_tokenizer(directory, vocabulary)
    return directory


def build(directory: Path, seed: int, vocabulary: int = VOCAB) -> None:
    """A ``warm_start.builder``."""
    save_model(directory, seed=seed, vocabulary=vocabulary)


def recipe(model: Path | None, **sections: Any) -> Recipe:
    """A run of six steps with a checkpoint every two; ``trainer``, ``run``, ``batch`` and ``algorithm`` are merged, others are added."""
    trainer = {
        "port": 0,
        "device": "cpu",
        "checkpoint_every": 2,
        "token_budget": 64,
        "max_mismatch": 1e3,
    } | sections.pop("trainer", {})
    run = {"id": "test-run", "steps": 6, "seed": 3} | sections.pop("run", {})
    policy = {
        "model": {"path": None if model is None else str(model), "context_length": 64},
        "algorithm": sections.pop("algorithm", {}),
        "optimizer": {"lr": 1e-2, "schedule": "linear"},
        "batch": {"size": 8, "minibatches": 2} | sections.pop("batch", {}),
        "trainer": trainer,
        "weights": {"publish_dtype": "float32", "port": 0},
    }
    tree = {
        "name": "trainer-test",
        "run": run,
        "policies": {POLICY: policy},
        "data": {"train": {"path": "tasks.jsonl"}},
        "sampling": {"max_new_tokens": 16},
        "evaluation": {"at_start": False, "at_end": False},
        "envgateway": None,
        **sections,
    }
    return validate(tree, source="test")


def batch_of(training_step: int, rank: int = 0, num_ranks: int = 1) -> RankBatch:
    """The recorded batch of a step, the same on every call."""
    sequences = training_sequences(8, seed=training_step, minibatches=2)
    return rank_batch(sequences, rank, num_ranks, step=training_step)


class DigestPublisher:
    """Publishes without files or processes: real digests, no address to fetch from."""

    def __init__(self, step: TrainStep) -> None:
        self._step = step

    def publish(self, version: int) -> Published:
        weights = b"".join(p.detach().numpy().tobytes() for p in self._step.model.parameters())
        return Published(
            version=WeightVersion(policy=POLICY, number=version, digest=tensor_digest(weights)),
            metrics={"snapshot_bytes": float(len(weights))},
        )
