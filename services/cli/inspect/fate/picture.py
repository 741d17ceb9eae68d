"""The fates of a run as a row of a picture for each policy: shares of the sampled tokens by step, and by length."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from services.cli.console import percent
from services.cli.inspect.fate.facts import Band, Fate, Tally
from services.cli.inspect.fate.reading import Fates

MOST_BARS = 100
IN_FLIGHT = "in flight"
UNFINISHED = (Fate.STOPPED, Fate.TIMED_OUT, Fate.FAILED, Fate.CANCELLED)

# From the bottom of a bar to its top: trained, lost because of age, left out by a filter, still open.
COLOURS = {
    Fate.TRAINED: "#3a9b5c",
    Fate.MASKED: "#b5dcb0",
    Fate.TOO_OLD: "#d1495b",
    Fate.TRUNCATED: "#e58a3c",
    Fate.SURPLUS: "#8d6a9f",
    Fate.RESAMPLED_AWAY: "#a8c5e8",
    Fate.EQUAL_REWARDS: "#5b8fc7",
    Fate.LEFT_OVER: "#bcbcbc",
    Fate.CANCELLED: "#9a9a9a",
    Fate.UNKNOWN: "#000000",
}
_GREY = "#dddddd"


def draw_fates(rows: Iterable[tuple[Any, Any]], found: Fates) -> None:
    """``rows``: for each policy, in order, the axes by step and those by length."""
    for (by_step, by_length), policy in zip(rows, found.policies, strict=True):
        of = "" if len(found.policies) == 1 else f" of {policy}"
        _draw_steps(by_step, found.steps(policy), of)
        _draw_lengths(by_length, found.lengths[policy].bands(), found.lengths[policy].means())


def _draw_steps(ax: Any, steps: dict[int, Tally], of: str) -> None:
    ax.set_title(f"fates of the sampled tokens{of}")
    ax.set_xlabel("training step in which the rollout was issued")
    ax.set_ylabel("share of its tokens")
    ax.set_ylim(0, 1)
    ax.yaxis.set_major_formatter(percent())
    bins = _binned(steps)
    if not bins:
        return
    width = bins[0][1]
    middles = [first + (width - 1) / 2 for first, _, _ in bins]
    bottom = [0.0] * len(bins)
    for fate, colour in (*COLOURS.items(), (None, _GREY)):
        shares = [_share(tally, fate) for _, _, tally in bins]
        if any(shares):
            label = IN_FLIGHT if fate is None else fate.label
            ax.bar(middles, shares, width=width, bottom=bottom, color=colour, label=label, linewidth=0)
            bottom = [low + share for low, share in zip(bottom, shares, strict=True)]
    lost = [sum(t.rollouts[f] for f in UNFINISHED) / max(1, t.issued_rollouts) for _, _, t in bins]
    if any(lost):
        ax.plot(middles, lost, "k:", linewidth=1.5, label="rollouts without an end\n(share of rollouts)")
    ax.set_xlim(bins[0][0] - 0.5, bins[-1][0] + width - 0.5)
    ax.xaxis.get_major_locator().set_params(integer=True)
    ax.grid(False)
    handles, labels = ax.get_legend_handles_labels()
    # As they are stacked: the uppermost first.
    ax.legend(handles[::-1], labels[::-1], fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)


def _binned(steps: dict[int, Tally]) -> list[tuple[int, int, Tally]]:
    """(first step, steps, their sum) of at most ``MOST_BARS`` bins of equal width."""
    if not steps:
        return []
    first, last = min(steps), max(steps)
    width = -(-(last - first + 1) // MOST_BARS)
    bins: list[tuple[int, int, Tally]] = []
    for start in range(first, last + 1, width):
        whole = Tally()
        for step in range(start, start + width):
            if step in steps:
                whole.add(steps[step])
        bins.append((start, width, whole))
    return bins


def _share(tally: Tally, fate: Fate | None) -> float:
    """Of the sampled tokens; None is all that is in flight."""
    if not tally.sampled_tokens:
        return 0.0
    if fate is not None:
        return tally.tokens[fate] / tally.sampled_tokens
    return sum(count for f, count in tally.tokens.items() if f.in_flight) / tally.sampled_tokens


def _draw_lengths(ax: Any, bands: list[Band], means: tuple[float, float] | None) -> None:
    ax.set_title("by length" + (f", length bias {means[0] / means[1]:.3f}" if means else ""))
    ax.set_xlabel("quantiles of the length, in sampled tokens")
    ax.set_ylabel("share of the sequences")
    ax.set_ylim(0, 1)
    ax.yaxis.set_major_formatter(percent())
    bottom = [0.0] * len(bands)
    for fate, colour in COLOURS.items():
        shares = [band.fates[fate] / band.num_sequences for band in bands]
        if any(shares):
            ax.bar(range(len(bands)), shares, width=0.8, bottom=bottom, color=colour, linewidth=0)
            bottom = [low + share for low, share in zip(bottom, shares, strict=True)]
    for place, band in enumerate(bands):
        inside = band.trained_share > 0.12
        ax.text(
            *(place, band.trained_share / 2 if inside else band.trained_share + 0.02),
            f"{band.trained_share:.0%}",
            ha="center",
            va="center" if inside else "bottom",
            fontsize=9,
            color="white" if inside else "black",
        )
    spans = ["–".join(dict.fromkeys((_short(b.shortest), _short(b.longest)))) for b in bands]
    ax.set_xticks(range(len(bands)), [f"{b.name}\n{span}" for b, span in zip(bands, spans, strict=True)], fontsize=8)
    ax.grid(False)


def _short(tokens: int) -> str:
    """
    >>> _short(999), _short(1257), _short(52_000)
    ('999', '1.3k', '52k')
    """
    if tokens < 1000:
        return str(tokens)
    return f"{tokens / 1000:.1f}k" if tokens < 10_000 else f"{tokens / 1000:.0f}k"
