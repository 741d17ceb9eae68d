"""A loss: PPO's clipped objective with another bound where the advantage is negative.

policies: {model0: {algorithm: {name: "loss:clipped", settings: {eps: 0.2, eps_negative: 0.1}}}}
"""

import torch

import rollmill


def clipped(tokens: rollmill.TokenBatch, settings) -> rollmill.PolicyLoss:
    """One number per token; the trainer adds them up and divides."""
    ratio = rollmill.log_ratio(tokens.logprobs, tokens.behaviour, clamp=20.0).exp()
    low = torch.where(tokens.advantages < 0, 1 - settings["eps_negative"], 1 - settings["eps"])
    bounded = ratio.clamp(max=1 + settings["eps"]).maximum(low)
    objective = torch.minimum(ratio * tokens.advantages, bounded * tokens.advantages)
    cut = tokens.mask & (ratio * tokens.advantages > objective)
    return rollmill.PolicyLoss(per_token=rollmill.masked(-objective, tokens.mask), counts={"cut_tokens": cut.sum()})
