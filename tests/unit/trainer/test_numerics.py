"""Engine and trainer are compared before a batch is trained; a fault of either is named with its cause."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from services.common.config.training import AdapterConfig
from services.common.kept_tokens import kept_rows, pack
from services.common.records import RankBatch, Segment, StopReason, TrainingSequence
from services.common.records import TokenSequence as Row
from services.common.tiny import build
from services.trainer import numerics
from services.trainer.model import micro_batches
from services.trainer.model.attention import Branch
from services.trainer.model.policy_model import AdapterSetup
from services.trainer.numerics import MismatchError, NumericsGate
from tests.unit.trainer.building import algorithm, rank_batch, train_step

BOUND = 1e-3
TYPES = {"trainer.compute_dtype": "float32", "inference.a.dtype": "float32"}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model")
    build(made, seed=3)
    return made


@dataclass
class Engine:
    """Scores rows with transformers alone, row by row: a correct engine, of which tests change one thing."""

    model: Any
    temperature: float = 1.0
    reads: Callable[[list[int]], list[int]] = lambda prompt: prompt
    late: int = 0  # tokens by which its values are off
    kept: int | None = None  # ids that it may sample, from 0

    @torch.no_grad()
    def scores(self, prompt: list[int], answer: list[int]) -> np.ndarray:
        read = self.reads(prompt)
        logits = self.model(torch.tensor([[*read, *answer]])).logits[0, len(read) - 1 : -1].float() / self.temperature
        values = logits[:, : self.kept].log_softmax(-1)[torch.arange(len(answer)), torch.tensor(answer)].numpy()
        return np.roll(values, self.late)


class World:
    """A trainer with its gate, and the engine's batches."""

    def __init__(self, directory: Path, **settings: Any) -> None:
        self.directory, self.tokenizer = directory, AutoTokenizer.from_pretrained(directory)
        self.step = train_step(algorithm(), causal_lm=self.load(), max_tokens=512, **settings)
        self.gate = NumericsGate(self.step, self.tokenizer, "p", BOUND, TYPES)
        self.engine = Engine(self.load())

    def load(self) -> Any:
        return AutoModelForCausalLM.from_pretrained(self.directory, attn_implementation="eager").eval()

    def batch(self, number: int = 1, version: int | None = None) -> RankBatch:
        rng = np.random.default_rng(number)
        rows = []
        for i in range(8):
            text = f"What is {rng.integers(100)} + {rng.integers(100)}?"
            prompt = self.tokenizer.apply_chat_template(
                [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
            )
            ids, answer = self.tokenizer.encode(prompt), rng.integers(20, 1000, 8).tolist()
            policy = Segment.policy(
                np.array(answer),
                self.engine.scores(ids, answer),
                weight_version=number - 1 if version is None else version,
                kept=b"" if self.engine.kept is None else self.packed(answer),
            )
            segments = (Segment.environment(np.array(ids)), policy)
            row = Row(policy="actor", segments=segments, reward=float(i % 2), stop_reason=StopReason.STOP)
            rows.append(
                TrainingSequence(
                    sequence_id=f"g/{i}/0", sequence=row, group_mean=0.5, group_std=0.5, group_size=8, staleness=0,
                    minibatch=0, position=i,
                )
            )  # fmt: skip
        return rank_batch(rows, self.step.ranks.rank, self.step.ranks.world_size, step=number)

    def packed(self, answer: list[int]) -> bytes:
        kept, count = np.arange(self.engine.kept), len(answer)
        return pack(kept_rows(np.tile(kept, (count, 1)), np.full(count, len(kept)), np.array(answer)), count)

    def train(self, number: int = 1, version: int | None = None) -> None:
        self.step.run(self.batch(number, version), self.gate.check if self.gate.left else None)

    def refusal(self, number: int = 1) -> str:
        before = copy.deepcopy(self.step.model.state_dict())
        with pytest.raises(MismatchError) as refused:
            self.train(number)
        after = self.step.model.state_dict()
        assert all(torch.equal(before[name], after[name]) for name in before), "probes put everything back"
        assert all(p.grad is None for p in self.step.model.parameters())
        return refused.value.message


def named(message: str) -> str:
    return message.partition("Likely cause: ")[2].partition(" (")[0]


def test_an_engine_without_a_fault_is_not_refused(directory: Path) -> None:
    world = World(directory)
    for number in range(1, 5):
        world.engine.model.load_state_dict(world.step.model.causal_lm.state_dict())
        world.train(number)


def wrong_base(world: World) -> None:
    rotary = world.engine.model.model.rotary_emb
    rotary.inv_freq.copy_(rotary.inv_freq ** (np.log(3e5) / np.log(1e4)))


def exchanged_layers(world: World) -> None:
    layers = world.engine.model.model.layers
    layers[0], layers[1] = layers[1], layers[0]
    for index, layer in enumerate(layers):
        layer.self_attn.layer_idx = index


def without_opening(world: World) -> Callable[[list[int]], list[int]]:
    opening = len(world.tokenizer.encode("<|im_start|>assistant\n"))
    return lambda prompt: prompt[:-opening]


def without_template(world: World) -> Callable[[list[int]], list[int]]:
    tokenizer = world.tokenizer
    return lambda ids: tokenizer.encode(tokenizer.decode(ids).split("user\n")[1].split("<|im_end|>")[0])


def half(world: World) -> None:
    world.engine.model.to(torch.bfloat16)


def engine(**changes: Any) -> Callable[[World], None]:
    return lambda world: world.engine.__dict__.update(changes)


FAULTS: dict[str, tuple[Callable[[World], None], str]] = {
    "rope base": (wrong_base, "rope base"),
    "exchanged layers": (exchanged_layers, "order of layers"),
    "half precision": (half, "half precision"),
    "hotter": (engine(temperature=1.1), "temperature"),
    "colder": (engine(temperature=1 / 1.3), "temperature"),
    "end token behind": (engine(reads=lambda prompt: [*prompt, 1]), "one token more or less"),
    "begins with a token": (engine(reads=lambda prompt: [1, *prompt]), "one token more or less"),
    "no opening": (lambda world: engine(reads=without_opening(world))(world), "template"),
    "no template": (lambda world: engine(reads=without_template(world))(world), "template"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_the_first_batch_is_named(directory: Path, fault: str) -> None:
    world = World(directory)
    inject, cause = FAULTS[fault]
    inject(world)
    message = world.refusal()
    assert named(message) == cause, message
    assert "max_mismatch=" in message and message.count(" then '") == 10, "the remedy and the ten worst tokens"


def test_packed_rows_that_leak_are_named(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = micro_batches.Documents

    def leaking(branches: Sequence[Branch], device: torch.device) -> Any:
        return original((Branch(0, branches[-1].end, np.zeros(0, dtype=np.int64)),), device)

    world = World(directory)
    monkeypatch.setattr(micro_batches, "Documents", leaking)
    assert named(world.refusal()) == "packing"


def test_a_replica_that_takes_no_weights_is_named_after_two_updates(directory: Path) -> None:
    world = World(directory)
    world.train(1)
    world.engine.model.load_state_dict(world.step.model.causal_lm.state_dict())
    world.train(2)  # from here on the engine keeps version 1
    assert named(world.refusal(3)) == "older weights"


def test_a_head_that_is_not_repacked_is_named(directory: Path) -> None:
    world = World(directory)
    head = world.engine.model.lm_head.weight.detach().clone()
    for number in (1, 2):
        world.train(number)
    world.engine.model.load_state_dict(world.step.model.causal_lm.state_dict())
    world.engine.model.lm_head.weight = torch.nn.Parameter(head)
    assert named(world.refusal(3)) == "head of an older version"


def test_an_adapter_that_is_not_applied_is_named(directory: Path) -> None:
    setup = AdapterSetup(config=AdapterConfig(rank=4, alpha=8.0), dtype=torch.float32, seed=1)
    world = World(directory, adapter=setup)
    world.train(1)  # version 0 of an adapter is the base
    world.train(2)
    assert named(world.refusal(3)) == "adapter not applied"


def test_a_change_that_leaves_much_of_the_difference_is_not_the_cause(directory: Path) -> None:
    world = World(directory)
    for module in world.engine.model.modules():
        if hasattr(module, "variance_epsilon"):
            module.variance_epsilon = 0.05
    message = world.refusal()
    assert named(message).startswith("no probe explains it"), message


def test_late_tokens_are_no_mismatch_and_the_next_fresh_batch_is_compared(directory: Path) -> None:
    world = World(directory)
    world.engine.temperature = 2.0
    world.train(1, version=7)  # no token of version 0
    world.engine.model.load_state_dict(world.step.model.causal_lm.state_dict())
    assert named(world.refusal(2)) == "temperature"


def test_probes_end_at_their_deadline(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(directory)
    world.engine.temperature = 2.0
    monkeypatch.setattr(numerics, "PROBES_S", -1.0)
    message = world.refusal()
    assert named(message).startswith("no probe explains")
