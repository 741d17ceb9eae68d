"""TRL's side of ``race.py``: GRPO on one of the two tasks, or GRPO without its baseline. Runs in an environment of its own (``make race-env``).

    python benchmarks/_race_trl.py SETTINGS.json

The settings name a checkpoint, a file of rows, a task (``code`` or ``tool``), and the settings of TRL. Each generated
batch is a line of the output file: seconds and CPU seconds since training began, and its rewards. Imports and the
loading of the model come before that. Uses only the reward and the tool of Rollmill, which are plain functions.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from benchmarks._race_programs import passes, run_tool
from recipes.quickstart.reward import boxed_answer  # the recipe's own reward

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class Curve:
    """Writes the sampled batches, and ends the training when the goal or the cap is reached."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._file = Path(settings["output"]).open("w")  # noqa: SIM115 - open as long as the process
        self._window, self._goal, self._cap_s = settings["window"], settings["goal"], settings["cap_s"]
        self._rewards: list[float] = []
        self._began = self._cpu_began = 0.0
        self.over = False

    def begin(self) -> None:
        self._began, self._cpu_began = time.perf_counter(), _cpu_s()

    def add(self, rewards: Sequence[float]) -> None:
        wall_s = time.perf_counter() - self._began
        line = {"wall_s": round(wall_s, 3), "cpu_s": round(_cpu_s() - self._cpu_began, 3), "rewards": list(rewards)}
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        self._rewards.extend(rewards)
        last = self._rewards[-self._window :]
        hit = len(last) >= self._window and sum(last) / len(last) >= self._goal
        self.over = self.over or hit or wall_s > self._cap_s


class RewardTrainer(GRPOTrainer):  # type: ignore[misc]
    """GRPO without a baseline: the advantage of a rollout is its reward. TRL has no setting for that."""

    rewards: Sequence[float] = ()  # of the batch that was scored last, in its order

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        batch: dict[str, Any] = super()._generate_and_score_completions(inputs)
        advantages = batch["advantages"]
        batch["advantages"] = torch.tensor(self.rewards, dtype=advantages.dtype, device=advantages.device)
        assert batch["advantages"].shape == advantages.shape
        return batch


TRAINERS = {"group": GRPOTrainer, "reward": RewardTrainer}


class Until(TrainerCallback):
    def __init__(self, curve: Curve) -> None:
        self._curve = curve

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._curve.begin()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = control.should_training_stop or self._curve.over


def main() -> None:
    settings = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(settings["threads"])
    rows = [json.loads(line) for line in Path(settings["rows"]).read_text().splitlines()]
    tokenizer = AutoTokenizer.from_pretrained(settings["checkpoint"])
    model = AutoModelForCausalLM.from_pretrained(settings["checkpoint"], dtype=torch.float32)
    curve = Curve(settings)
    task = TASKS[settings["task"]](settings)
    tasks = {row["id"]: row for row in rows}

    def reward(completions: Sequence[Any], id: Sequence[str], **kwargs: Any) -> list[float]:
        rewards = [
            task.score(tasks[name], text) for name, text in zip(id, task.texts(completions, kwargs), strict=True)
        ]
        curve.add(rewards)
        trainer.rewards = rewards
        return rewards

    trainer = TRAINERS[settings["advantage"]](
        model=model,
        processing_class=tokenizer,
        reward_funcs=reward,
        train_dataset=Dataset.from_list([{"prompt": row["messages"], "id": row["id"]} for row in rows]),
        args=_arguments(settings, task),
        callbacks=[Until(curve)],
        **task.extra(tokenizer),
    )
    trainer.train()


class Code:
    """One turn: a program."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self.max_completion_length = settings["max_new_tokens"]

    def score(self, row: Mapping[str, Any], text: str) -> float:
        return passes(row, text)

    def texts(self, completions: Sequence[Any], extra: Mapping[str, Any]) -> list[str]:
        return [completion[0]["content"] for completion in completions]

    def extra(self, tokenizer: Any) -> dict[str, Any]:
        return {}


class Tool:
    """Turns with a tool between them, all rollouts of a batch together: three calls of ``generate`` at most.

    TRL's ``tools`` would do the same for calls that its templates know, one conversation at a time; this is its hook for
    loops of one's own (``rollout_func``), over its own generation.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._turn_tokens, self._turns = settings["max_new_tokens"], settings["max_turns"]
        self._context = settings["context_length"]
        self.max_completion_length = self._context
        self._suffixes: dict[str, list[int]] = {}

    def score(self, row: Mapping[str, Any], text: str) -> float:
        return boxed_answer(row, text)

    def texts(self, completions: Sequence[Any], extra: Mapping[str, Any]) -> Sequence[str]:
        return extra["last_turn"]

    def extra(self, tokenizer: Any) -> dict[str, Any]:
        return {"rollout_func": self._play}

    def _play(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        tokenizer = trainer.processing_class
        prompt_ids = tokenizer.apply_chat_template(prompts, add_generation_prompt=True)["input_ids"]
        completion_ids: list[list[int]] = [[] for _ in prompts]
        masks: list[list[int]] = [[] for _ in prompts]
        last_turn = [""] * len(prompts)
        trainer.generation_config.max_new_tokens = self._turn_tokens
        going = list(range(len(prompts)))
        for turn in range(1, self._turns + 1):
            heads = [prompt_ids[i] + completion_ids[i] for i in going]
            said, _ = trainer._generate_single_turn(heads, None, {}, trainer.num_generations)
            texts = tokenizer.batch_decode(said, skip_special_tokens=False)
            going_on = []
            for i, ids, text in zip(going, said, texts, strict=True):
                completion_ids[i] = completion_ids[i] + ids
                masks[i] = masks[i] + [1] * len(ids)
                last_turn[i] = text.removesuffix(tokenizer.eos_token)
                if ids[-1] != tokenizer.eos_token_id or turn == self._turns or OPEN not in text:
                    continue
                answer = self._answer(tokenizer, text.partition(OPEN)[2])
                if len(prompt_ids[i]) + len(completion_ids[i]) + len(answer) + self._turn_tokens <= self._context:
                    completion_ids[i] = completion_ids[i] + answer
                    masks[i] = masks[i] + [0] * len(answer)
                    going_on.append(i)
            going = going_on
            if not going:
                break
        return {
            "prompt_ids": prompt_ids,
            "completion_ids": completion_ids,
            "logprobs": None,
            "env_mask": masks,
            "last_turn": last_turn,
        }

    def _answer(self, tokenizer: Any, call: str) -> list[int]:
        """The tokens between two turns of the policy."""
        code, closed, _ = call.partition(CLOSE)
        told = run_tool(code.strip()) if closed else "Error: malformed tool call"
        if told not in self._suffixes:
            text = tokenizer.apply_chat_template(
                [{"role": "tool", "content": told[:256]}], tokenize=False, add_generation_prompt=True
            )
            self._suffixes[told] = tokenizer.encode(text, add_special_tokens=False)
        return self._suffixes[told]


TASKS: dict[str, Any] = {"code": Code, "tool": Tool}


def _arguments(settings: Mapping[str, Any], task: Any) -> GRPOConfig:
    size, minibatches = settings["prompts"] * settings["group_size"], settings["minibatches"]
    return GRPOConfig(
        output_dir=str(Path(settings["output"]).parent / "trl"),
        per_device_train_batch_size=size // minibatches,
        steps_per_generation=minibatches,
        gradient_accumulation_steps=1,
        num_generations=settings["group_size"],
        max_completion_length=task.max_completion_length,
        temperature=1.0,
        max_steps=settings["max_steps"],
        learning_rate=settings["learning_rate"],
        lr_scheduler_type=settings["schedule"],
        adam_beta1=0.9,
        adam_beta2=0.95,
        weight_decay=0.0,
        beta=0.0,
        loss_type=settings["loss_type"],
        seed=settings["seed"],
        use_cpu=True,
        bf16=False,
        fp16=False,
        gradient_checkpointing=False,
        disable_dropout=True,
        logging_strategy="steps",
        logging_steps=1_000_000,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        **settings.get("more", {}),
    )


def _cpu_s() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


if __name__ == "__main__":
    main()
