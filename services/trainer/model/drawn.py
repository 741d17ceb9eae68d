"""The sampling distribution of each target of a micro-batch: the tokens that the sampler kept, and the temperature.

The trainer scores a token that was sampled with top-k, top-p, min-p or ``min_new_tokens`` over the sampler's kept set,
not over the set that the trainer's own weights would keep. So the ratio of a policy to itself is 1, and importance
weights compare two distributions over one set.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from services.common.records.kept_tokens import KeptSets


@dataclass(frozen=True, slots=True, eq=False)
class KeptBlocks:
    """Kept sets on the device, handed out in blocks of tokens and vocabulary."""

    left_out: torch.Tensor  # [num_tokens] bool, as in ``KeptSets``
    rows: torch.Tensor  # [num_pairs] int64, ascending
    ids: torch.Tensor  # [num_pairs] int64
    offsets: npt.NDArray[np.int64]  # [num_tokens + 1], on the host: pairs of token i are offsets[i]:offsets[i + 1]
    cut: npt.NDArray[np.bool_]  # [num_tokens], on the host: not drawn from the whole vocabulary
    sole: npt.NDArray[np.bool_]  # [num_tokens], on the host: no other token could be drawn

    @classmethod
    def on(cls, sets: KeptSets, device: torch.device) -> KeptBlocks | None:
        """None when every token was drawn from the whole vocabulary."""
        counts = np.bincount(sets.rows, minlength=sets.num_tokens)
        cut = ~sets.left_out | (counts > 0)
        if not cut.any():
            return None
        return cls(
            torch.as_tensor(sets.left_out, device=device),
            torch.as_tensor(sets.rows, device=device),
            torch.as_tensor(sets.ids, device=device),
            np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(counts)]),
            cut,
            ~sets.left_out & (counts == 1),
        )

    def tokens(self, chosen: slice) -> KeptBlocks | None:
        """The sets of some consecutive tokens; None when none of them is cut."""
        start, stop = chosen.start, min(chosen.stop, len(self.cut))
        if not self.cut[start:stop].any():
            return None
        pairs = slice(int(self.offsets[start]), int(self.offsets[stop]))
        return KeptBlocks(
            self.left_out[start:stop],
            self.rows[pairs] - start,
            self.ids[pairs],
            self.offsets[start : stop + 1] - self.offsets[start],
            self.cut[start:stop],
            self.sole[start:stop],
        )

    def hidden(self, vocabulary: slice) -> torch.Tensor:
        """Tokens of a block of the vocabulary outside the kept sets. [num_tokens, block] bool"""
        width = vocabulary.stop - vocabulary.start
        # Ids outside the block go to an extra column: a selection of those inside would wait for the device.
        column = (self.ids - vocabulary.start).clamp(-1, width)
        column = torch.where(column < 0, width, column)
        hidden = (~self.left_out)[:, None].repeat(1, width + 1)
        hidden[self.rows, column] = self.left_out[self.rows]
        return hidden[:, :width]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Drawn:
    """The sampling distributions of the targets of a micro-batch."""

    kept: KeptBlocks | None  # None: from the whole vocabulary
    temperatures: torch.Tensor | None  # [num_targets], NaN where it is the recipe's; None: everywhere

    @property
    def num_sole_choices(self) -> int:
        """Number of targets without an alternative in the kept set: their probability is 1, their gradient 0."""
        return 0 if self.kept is None else int(self.kept.sole.sum())
