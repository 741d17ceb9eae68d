"""Adapters of the oracle files that are advantages, returns, values and a teacher's say."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch

from benchmarks._oracle_losses import compared, section
from benchmarks._oracle_run import Tokens, run_loss, without
from benchmarks._oracle_vectors import Adapter, Answer, Case, Values, judge
from services.common.config.algorithm import AlgorithmConfig
from services.common.config.training import OverlongPenaltyConfig
from services.common.records import MinibatchTotals, Segment, StopReason, TokenSequence, TrainingSequence
from services.orchestrator.buffer.buffer import overlong_penalty as penalty_of
from services.orchestrator.buffer.buffer import statistics
from services.trainer.advantages import Moments, at_last_token, discounted_sums, gae, normalize, sequence_advantages
from services.trainer.losses import aggregate, value_loss

VERL_EPS = 1e-8  # verl has it under the root, added to the variance

SINGLETON = "a group of one: verl takes its reward for its advantage, here it is 0"
EPS_UNDER_THE_ROOT = (
    "verl adds 1e-8 to the variance, here eps is added to the deviation: it shows where rewards hardly spread"
)
UNCAPPED = "AReaL's penalty goes on growing beyond max_tokens, here it ends at factor, as in DAPO's paper"
FALLEN = "prime-rl drops a token when its probability fell against the teacher's advantage, dppo goes by the advantage's sign"


def stamped(case: Case) -> list[TrainingSequence]:
    """One sequence per reward, with the statistics of its whole group, as the orchestrator stamps them."""
    rewards, groups = case.inputs["rewards"], case.inputs["groups"]
    result = []
    for i, (reward, group) in enumerate(zip(rewards, groups, strict=True)):
        siblings = [r for r, g in zip(rewards, groups, strict=True) if g == group]
        mean, std = statistics(siblings)
        segments = (Segment.environment([0]), Segment.policy([0], [0.0], 0))
        result.append(
            TrainingSequence(
                sequence_id=f"{group}/{i}/0",
                sequence=TokenSequence(policy="p", segments=segments, reward=reward, stop_reason=StopReason.STOP),
                group_mean=mean, group_std=std, group_size=len(siblings), staleness=0, minibatch=0, position=i,
            )
        )  # fmt: skip
    return result


def differing(case: Case, outputs: dict[str, Values], left_out: Sequence[int], reason: str) -> Answer:
    """The reason holds only if all elements but ``left_out`` agree."""
    rest = {name: without(v, left_out) if isinstance(v, Sequence) else v for name, v in outputs.items()}
    alike = judge(case, Answer(outputs=rest)).agrees
    return Answer(
        outputs=outputs, by_design=reason if alike and not judge(case, Answer(outputs=outputs)).agrees else None
    )


def of_groups(case: Case, advantage: str, eps: float = 1e-5) -> Answer:
    config = AlgorithmConfig(advantage=advantage, advantage_eps=eps)  # type: ignore[arg-type]
    sequences = stamped(case)
    found = sequence_advantages(sequences, config).tolist()
    alone = [i for i, s in enumerate(sequences) if s.group_size == 1]
    return differing(case, {"advantages": found}, alone, SINGLETON)


def grpo_advantage(case: Case) -> Answer:
    return of_groups(case, "grpo", case.settings["eps"])


def dr_grpo_advantage(case: Case) -> Answer:
    return of_groups(case, "dr_grpo")


def rloo_advantage(case: Case) -> Answer:
    return of_groups(case, "rloo")


def whitening(kind: Literal["population", "sample"], eps: float) -> AlgorithmConfig:
    return AlgorithmConfig(
        advantage="reinforce", batch_normalize_advantages=True, normalize_deviation=kind, advantage_eps=eps
    )


def batch_normalize(case: Case) -> Answer:
    config = whitening("population", case.settings["eps"])
    advantages, tokens = np.array(case.inputs["advantages"]), np.array(case.inputs["trained_tokens"], dtype=float)
    return Answer(outputs={"advantages": normalize(advantages, Moments.of(advantages, tokens), config).tolist()})


def verl_whitened(values: np.ndarray, tokens: np.ndarray) -> tuple[list[float], bool]:
    """(whitened, whether the place of the eps shows beyond the oracle's tolerance)."""
    moments = Moments.of(values, tokens)
    variance = moments.deviation("sample") ** 2
    return normalize(values, moments, whitening("sample", VERL_EPS)).tolist(), variance < 0.1


def reinforce_plus_plus(case: Case) -> Answer:
    sequences = stamped(case)
    tokens = np.array(case.inputs["trained_tokens"])
    if case.settings["baseline"] is not None:
        centred = sequence_advantages(sequences, AlgorithmConfig(advantage="dr_grpo"))
        found, tiny = verl_whitened(centred, tokens.astype(float))
        if any(s.group_size == 1 for s in sequences):  # its advantage moves the mean of all
            return Answer(outputs={"advantages": found}, by_design=SINGLETON)
        return Answer(outputs={"advantages": found}, by_design=EPS_UNDER_THE_ROOT if tiny else None)
    index = torch.repeat_interleave(torch.arange(len(tokens)), torch.as_tensor(tokens))
    rewards = torch.as_tensor(sequence_advantages(sequences, AlgorithmConfig(advantage="reinforce")))[index]
    returns = discounted_sums(at_last_token(rewards, index), index, case.settings["gamma"])
    whitened, tiny = verl_whitened(returns.numpy(), np.ones(len(returns)))
    outputs: dict[str, Values] = {"token_returns": returns.tolist(), "token_advantages": whitened}
    return differing(case, outputs, [], EPS_UNDER_THE_ROOT) if not tiny else _but_for_whitening(case, outputs)


def _but_for_whitening(case: Case, outputs: dict[str, Values]) -> Answer:
    exact = judge(case, Answer(outputs={"token_returns": outputs["token_returns"]})).agrees
    alike = judge(case, Answer(outputs=outputs)).agrees
    return Answer(outputs=outputs, by_design=EPS_UNDER_THE_ROOT if exact and not alike else None)


def gae_(case: Case) -> Answer:
    tokens = Tokens.of(case)
    advantages, returns = gae(
        tokens.input("rewards"), tokens.input("values"), tokens.sequence, case.settings["gamma"], case.settings["lam"]
    )
    whitened, _ = verl_whitened(advantages.numpy(), np.ones(len(advantages)))
    return Answer(
        outputs={
            "raw_advantages": tokens.spread(advantages),
            "returns": tokens.spread(returns),
            "whitened_advantages": tokens.spread(torch.tensor(whitened, dtype=torch.float64)),
        }
    )


def value_loss_(case: Case) -> Answer:
    tokens = Tokens.of(case)
    values = tokens.input("value_predictions").requires_grad_()
    per_token, clipped = value_loss(
        values, tokens.input("old_values"), tokens.input("returns"), case.settings["value_clip"]
    )
    totals = MinibatchTotals(num_sequences=tokens.num_sequences, num_trained_tokens=len(values))
    loss = aggregate(
        per_token, torch.ones_like(clipped), tokens.sequence, tokens.num_sequences, totals, section(case, "reinforce")
    )
    (gradient,) = torch.autograd.grad(loss, values)
    return Answer(
        outputs={
            "loss": loss.item(),
            "gradient_wrt_value_predictions": tokens.spread(gradient),
            "counts.clipped_tokens": int(clipped.sum()),
        }
    )


def overlong_penalty(case: Case) -> Answer:
    config = OverlongPenaltyConfig.model_validate(dict(case.settings))
    lengths = case.inputs["response_tokens"]
    shaped = [r - penalty_of(n, config) for r, n in zip(case.inputs["rewards"], lengths, strict=True)]
    beyond = [i for i, n in enumerate(lengths) if n > config.max_tokens]
    return differing(case, {"shaped_rewards": shaped}, beyond, UNCAPPED)


def distillation(case: Case) -> Answer:
    teacher: dict[str, Any] = {"teacher_model": "the oracle's"}
    if case.oracle == "rlinf":
        return compared(
            case, run_loss(case, section(case, "reinforce", distillation={**teacher, "student": "behaviour"}))
        )
    config = section(
        case,
        "dppo",
        probability_low=case.settings["probability_drop_limit"],
        probability_high=1.0,
        behaviour_penalty=case.settings["kl_tau"],
        distillation=teacher,
    )
    found = compared(case, run_loss(case, config)).outputs
    tokens = Tokens.of(case)
    logprobs, behaviour = tokens.input("logprobs"), tokens.input("behaviour")
    fallen = behaviour.exp() - logprobs.exp() > case.settings["probability_drop_limit"]
    liked = fallen & (tokens.input("reference") > logprobs)
    gradients = {"gradient": found["gradient"]}
    if not liked.any():
        return Answer(outputs=found)
    return Answer(outputs=found, by_design=differing(case, gradients, tokens.index[liked].tolist(), FALLEN).by_design)


ADAPTERS: dict[str, Adapter] = {
    "batch_normalize": batch_normalize,
    "distillation": distillation,
    "dr_grpo_advantage": dr_grpo_advantage,
    "gae": gae_,
    "grpo_advantage": grpo_advantage,
    "overlong_penalty": overlong_penalty,
    "reinforce_plus_plus": reinforce_plus_plus,
    "rloo_advantage": rloo_advantage,
    "value_loss": value_loss_,
}
