"""Of which distribution the log-probabilities of a micro-batch are: what the sampler could draw, at what temperature.

A token that was drawn with top-k, top-p, min-p or under ``min_new_tokens`` is scored over the set that its sampler kept,
whatever set the trainer's own weights would keep. So the ratio of a policy to itself is 1, and importance weights are
those between two distributions over one set.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from services.common.kept_tokens import KeptSets


@dataclass(frozen=True, slots=True, eq=False)
class KeptBlocks:
    """Kept sets on the device, handed out in blocks of tokens and vocabulary."""

    left_out: torch.Tensor  # [num_tokens] bool, as in ``KeptSets``
    rows: torch.Tensor  # [num_pairs] int64, ascending
    ids: torch.Tensor  # [num_pairs] int64
    offsets: npt.NDArray[np.int64]  # [num_tokens + 1], on the host: pairs of token i are offsets[i]:offsets[i + 1]
    cut: npt.NDArray[np.bool_]  # [num_tokens], on the host: not drawn from the whole vocabulary

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
        )

    def hidden(self, vocabulary: slice) -> torch.Tensor:
        """Which tokens of a block of the vocabulary could not be drawn. [num_tokens, block] bool"""
        width = vocabulary.stop - vocabulary.start
        # Ids outside the block go to a column of their own: choosing those inside would wait for the device.
        column = (self.ids - vocabulary.start).clamp(-1, width)
        column = torch.where(column < 0, width, column)
        hidden = (~self.left_out)[:, None].repeat(1, width + 1)
        hidden[self.rows, column] = self.left_out[self.rows]
        return hidden[:, :width]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Drawn:
    """Of the targets of a micro-batch."""

    kept: KeptBlocks | None  # None: from the whole vocabulary
    temperatures: torch.Tensor | None  # [num_targets], NaN where it is the recipe's; None: everywhere
