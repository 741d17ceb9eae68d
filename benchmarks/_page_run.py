"""A run directory of any number of trajectories with texts, rewards, lengths and metrics, for the page; written fast.

Tasks are questions with an answer; a rollout is a system turn, a user turn, a call of a tool with its result, and an answer.
One in eight rollouts fails, as one in eight groups has equal rewards. ``hostile`` puts markup with scripts into every text.

    write_run(Path(folder), num_trajectories=100_000, tokenizer=Path(model))
"""

from __future__ import annotations

import json
import math
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from benchmarks._journal_million import FastWriter
from services.common.config.loading import save_resolved, validate
from services.common.records import (
    ClosedReason,
    GroupFate,
    MinibatchTotals,
    Purpose,
    RolloutFailure,
    Sampling,
    Segment,
    StopReason,
    Task,
    TaskGroupOrder,
    TokenSequence,
    Trajectory,
    WeightTransfer,
    WeightVersion,
)
from services.common.telemetry.metrics import MetricsWriter, RowKind, StallMoment, StepKey, ThroughputKey, TrainerKey
from services.common.weights.snapshot import Encoding
from services.orchestrator.journal import entries as records
from services.orchestrator.journal import entries as rollouts
from services.orchestrator.journal.entries import BatchEntry, BatchRecord, GroupRecord, GroupVerdict, MemberFate

POLICY = "model0"
GROUP_SIZE = 8
GROUPS_OF_BATCH = 16
NUM_TEMPLATES = 128
HOSTILE = (
    '<img src=x onerror="window.hacked=1"><script>window.hacked=1</script>\'"><svg onload=window.hacked=1>&lt;b&gt;'
)
_NAME = b"@GROUP@"
_TASK = "mill-{:04d}"


class RunWriter:
    """Writes one run. ``tokenizer``: a saved one, as a directory."""

    def __init__(self, run_dir: Path, tokenizer: Path, *, seed: int = 7, port: int = 1, hostile: bool = False) -> None:
        self._hostile = HOSTILE if hostile else ""
        self._random = np.random.default_rng(seed)
        self._step = 0
        _write_recipe(run_dir, tokenizer, seed, port)
        self._metrics = MetricsWriter(run_dir / "metrics" / "orchestrator.jsonl")
        self._directory = run_dir / "journal"
        self._journal = FastWriter(self._directory)
        self._templates: list[tuple[float, bytes]] = []
        self._tokenizer = tokenizer
        self._fates: dict[str, list[float | None]] = {}

    def write(self, num_trajectories: int) -> None:
        self._templates = self._make_templates(self._tokenizer, min(NUM_TEMPLATES, num_trajectories // 4))
        self._journal.record(records.RUN, "", {"run_id": "page", "mark": "page", "started_at": time.time()})
        self._publish(0)
        waiting: list[str] = []
        for number in range(1, num_trajectories // GROUP_SIZE + 1):
            name = f"page-{number:06d}"
            self._play(name, number)
            if self._fates[name]:
                waiting.append(name)
            if len(waiting) == GROUPS_OF_BATCH:
                self._train(waiting)
                waiting = []
        self._events()
        self._journal.close()
        self._metrics.close()

    def _make_templates(self, tokenizer: Path, count: int) -> list[tuple[float, bytes]]:
        from transformers import AutoTokenizer

        loaded = AutoTokenizer.from_pretrained(tokenizer, local_files_only=True)

        def spoken(text: str) -> Segment:
            ids = loaded.encode(text, add_special_tokens=False)
            logprobs = np.minimum(self._random.normal(-0.6, 0.7, len(ids)), 0).astype(np.float32)
            return Segment.policy(ids, logprobs, weight_version=0)

        made = []
        for number in range(count):
            a, b = (int(v) for v in self._random.integers(2, 99, 2))
            prompt = loaded.apply_chat_template(
                [
                    {"role": "system", "content": f"You have a calculator. {self._hostile}"},
                    {
                        "role": "user",
                        "content": f"A mill grinds {a} sacks a day. How many in {b} days? {self._hostile}",
                    },
                ],
                tokenize=False,
                add_generation_prompt=True,
            )
            thought = " ".join(f"Day {day} makes {a * day}." for day in range(1, 2 + number % 12))
            call = f'<think>{thought}</think>\n<tool_call>{{"name": "multiply", "arguments": [{a}, {b}]}}</tool_call>'
            reward = float(number % 3 == 0)
            answer = f"{self._hostile} The mill grinds {a * b if reward else a + b} sacks é漢🌾."
            segments = (
                Segment.environment(loaded.encode(prompt, add_special_tokens=False)),
                spoken(f"{call}<|im_end|>"),
                Segment.environment(
                    loaded.encode(
                        f"\n<|im_start|>user\n<tool_response>{a * b}</tool_response><|im_end|>\n<|im_start|>assistant\n",
                        add_special_tokens=False,
                    )
                ),
                spoken(f"{answer}<|im_end|>"),
            )
            sequence = TokenSequence(policy=POLICY, segments=segments, reward=reward, stop_reason=StopReason.STOP)
            trajectory = Trajectory(
                task_group_id=_NAME.decode(), index=0, sequences=(sequence,), reward=reward, replica_id="a",
                started_at=time.time() - 100, finished_at=time.time() - 99, metrics={"tool_calls": 1.0},
            )  # fmt: skip
            made.append((reward, orjson.dumps(rollouts.to_json(trajectory), option=orjson.OPT_APPEND_NEWLINE)))
        return made

    def _play(self, name: str, number: int) -> None:
        row = {"question": f"question {number % 1000} {self._hostile}", "answer": str(number % 1000)}
        order = TaskGroupOrder(
            task_group_id=name, task=Task(task_id=_TASK.format(number % 1000) + self._hostile, data=row),
            indices=tuple(range(GROUP_SIZE)), purpose=Purpose.TRAIN, sampling=Sampling(max_new_tokens=512),
            policies=(POLICY,), seed=number, timeout_s=60.0,
        )  # fmt: skip
        issued = GroupRecord(
            order=order, position=number - 1, evaluation="", replica_id="a", incarnation="1", born={POLICY: self._step}
        )
        self._journal.record(records.GROUP, name, records.to_json(issued))
        rewards: list[float | None] = []
        for index in range(GROUP_SIZE):
            key = rollouts.trajectory_key(name, index)
            if number % 8 == 1 and index == 7:
                failure = RolloutFailure(
                    task_group_id=name, index=index, reason="TIMEOUT", detail=f"60 s were over {self._hostile}"
                )
                self._journal.record(records.FAILURE, key, rollouts.to_json(failure))
                rewards.append(None)
                continue
            reward, line = self._templates[int(self._random.integers(len(self._templates))) if number % 8 else 0]
            line = line.replace(_NAME, name.encode()).replace(b'"index":0', b'"index":%d' % index, 1)
            self._journal.line(
                records.TRAJECTORY, key, line.replace(b'"weight_version":0', b'"weight_version":%d' % self._step)
            )
            rewards.append(reward)
        equal = len({reward for reward in rewards if reward is not None}) == 1
        self._fates[name] = [] if equal else rewards
        self._verdict(name, rewards, GroupFate.EQUAL_REWARDS if equal else GroupFate.KEPT)

    def _verdict(self, name: str, rewards: list[float | None], fate: GroupFate) -> None:
        there = [(index, reward) for index, reward in enumerate(rewards) if reward is not None]
        members = tuple(MemberFate(index=index, position=0, num_tokens=40, fate=fate) for index, _ in there)
        verdict = GroupVerdict(
            policy=POLICY, role="agent", attempt=0, num_sequences=len(there), mean=0.5, std=0.5, outcome=fate,
            num_kept=len(there) if fate is GroupFate.KEPT else 0, members=members,
        )  # fmt: skip
        self._journal.record(
            records.VERDICT, name, records.to_json(records.Verdicts(task_group_id=name, advantage_groups=(verdict,)))
        )
        if fate is not GroupFate.KEPT:
            closed = {"task_group_id": name, "reason": ClosedReason.NOTHING_TO_TRAIN.value}
            self._journal.record(records.CLOSED, name, closed)

    def _train(self, names: list[str]) -> None:
        self._step += 1
        entries = []
        for name in names:
            rewards = [(index, reward) for index, reward in enumerate(self._fates[name]) if reward is not None]
            values = [reward for _, reward in rewards]
            mean, std = float(np.mean(values)), float(np.std(values, ddof=1))
            entries += [
                BatchEntry(
                    sequence_id=f"{name}/{index}/0", minibatch=0, position=len(entries) + place, group_mean=mean,
                    group_std=std, group_size=len(values), staleness=1, num_tokens=40, reward=reward,
                )
                for place, (index, reward) in enumerate(rewards)
            ]  # fmt: skip
        totals = (MinibatchTotals(num_sequences=len(entries), num_trained_tokens=40 * len(entries)),)
        batch = BatchRecord(policy=POLICY, training_step=self._step, entries=tuple(entries), minibatches=totals)
        self._journal.record(records.BATCH, records.batch_key(POLICY, self._step), records.to_json(batch))
        for name in names:
            self._journal.record(records.CLOSED, name, {"task_group_id": name, "reason": ClosedReason.TRAINED.value})
        self._publish(self._step)
        self._step_row(len(entries))

    def _publish(self, number: int) -> None:
        version = WeightVersion(policy=POLICY, number=number, digest=f"{number:032x}")
        self._journal.record(
            records.VERSION,
            f"{POLICY}/{number}",
            records.to_json(records.VersionRecord(version=version, metrics={"loss": 0.5} if number else {})),
        )

    def _step_row(self, num_sequences: int) -> None:
        step, noise = self._step, float(self._random.normal(0, 0.03))
        values: dict[str, Any] = {
            StepKey.ROLLOUT_REWARD_MEAN: 1 - math.exp(-step / 200) + noise,
            StepKey.ROLLOUTS_FINISHED: num_sequences, StepKey.NUM_TRAINED_TOKENS: 40 * num_sequences,
            StepKey.RESPONSE_TOKENS_MEAN: 40 + 20 * noise, StepKey.STALENESS_MEAN: 1.0, StepKey.STALENESS_MAX: 2.0,
            StepKey.ELAPSED_S: 3.0 * step, TrainerKey.LOSS.in_row: noise, TrainerKey.ENTROPY.in_row: math.exp(-step / 300),
            TrainerKey.GRAD_NORM.in_row: 1 + abs(noise), TrainerKey.MISMATCH_KL.in_row: 0.001 + abs(noise) / 100,
        }  # fmt: skip
        self._metrics.write(
            RowKind.TRAINING_STEP, policy=POLICY, step=step, **{str(key): value for key, value in values.items()}
        )
        self._metrics.write(
            RowKind.THROUGHPUT, step=step, waits=[f"trainer waits for rollouts {self._hostile}"],
            **{ThroughputKey.TOKENS_PER_S.value: 900 + 500 * noise},
        )  # fmt: skip
        transfer = WeightTransfer(
            policy=POLICY, version=step, base_version=step - 1, encoding=Encoding.DELTA.value, transport="grpc",
            payload_size_bytes=700_000, num_changes=300_000, full_size_bytes=1_400_000, started_at=time.time(), encode_s=0.01,
            fetch_s=0.02 + abs(noise), verify_s=0.01, write_s=0.002, pause_s=0.001,
        )  # fmt: skip
        self._metrics.write(RowKind.WEIGHT_TRANSFER, replica=f"a{self._hostile}", **asdict(transfer))

    def _events(self) -> None:
        """A stall that ended and one that did not, an evaluation, and the time of every component."""
        who = f"replica/a{self._hostile}"
        for moment, cause in (
            (StallMoment.BEGIN, "silent"),
            (StallMoment.END, "silent"),
            (StallMoment.BEGIN, "no_slots"),
        ):
            self._metrics.write(
                RowKind.STALL, moment=moment, component=who, cause=cause, detail=f"no sign {self._hostile}", seconds=9.0
            )
        shares = {
            who: {"generating -> engine/model0": 0.6, "waiting for reward -> envgateway": 0.3, "idle": 0.1},
            "trainer/model0": {"training": 0.45, "waiting for a batch -> orchestrator": 0.55},
        }
        self._metrics.write(RowKind.ACCOUNTS, shares=shares, waits={})
        self._metrics.write(
            RowKind.EVALUATION, name="end/greedy", versions={POLICY: self._step}, newest_versions={POLICY: self._step},
            pinned=True, mean_reward=0.9, num_trajectories=64, num_failed=0, roles={}, compared_with="", difference=None,
            datasets=[{"name": "held_out", "mean_reward": {"value": 0.9, "low": 0.85, "high": 0.95}, "pass_at": {}}],
        )  # fmt: skip


def write_run(run_dir: Path, num_trajectories: int, tokenizer: Path, **options: Any) -> None:
    """A finished run; ``options`` are those of ``RunWriter``."""
    RunWriter(run_dir, tokenizer, **options).write(num_trajectories)


def _write_recipe(run_dir: Path, tokenizer: Path, seed: int, port: int) -> None:
    run_dir.mkdir(parents=True, exist_ok=True)
    data = run_dir / "tasks.jsonl"
    data.write_text(json.dumps({"question": "7", "answer": "7"}) + "\n")
    tree = {
        "name": "page",
        "run": {"id": run_dir.name, "steps": 1000, "seed": seed},
        "policies": {POLICY: {"model": {"path": str(tokenizer)}, "batch": {"size": GROUPS_OF_BATCH * GROUP_SIZE}}},
        "data": {"train": {"path": "tasks.jsonl"}},
        "evaluation": {"at_start": False, "at_end": False},
        "rollout": {"group_size": GROUP_SIZE},
        "orchestrator": {"port": port},
        "inference": {"a": {"engine": "scripted", "port": 0}},
        "envgateway": None,
    }
    save_resolved(validate(tree, source="benchmark"), run_dir)
