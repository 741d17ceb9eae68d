"""Chooses between the delta and the full snapshot for ``weights.transfer: auto``, by measured rates.

    receiver on the publisher's host that maps files   full: no bytes are coded, sent or decoded
    others                                             the cheaper of
        delta   rest of coding + bytes / link + decoding
        full    bytes / link

One choice per version holds for all receivers on other hosts, because receivers of the same payload pass its parts on to
each other. Before every rate is measured the choice is the delta: its transfer measures the rates.

Independent of snapshots, requests and threads: the caller holds a lock.
"""

from __future__ import annotations

from dataclasses import dataclass

import structlog

from services.common.telemetry.log_events import LogEvent
from services.common.weights.manifest import Encoding, ReceiverRates

log = structlog.get_logger()

_NEWEST_WEIGHT = 0.5  # of a new measurement in the running mean
_KEPT_CHOICES = 8  # versions
_IDLE_VERSIONS = 4  # without a request for a delta, before deltas are no longer coded in advance


@dataclass(frozen=True, slots=True)
class Choice:
    """The encoding for one version and one kind of receiver, and the reason with the estimated costs."""

    encoding: Encoding
    reason: str


@dataclass(slots=True, kw_only=True)
class MeasuredRates:
    """Running means; 0: not measured."""

    code_s_per_byte: float = 0.0  # of the version
    delta_share: float = 0.0  # bytes of a delta over bytes of its version
    link: float = 0.0  # bytes per second
    decode: float = 0.0  # bytes of the version per second

    def costs_s(self, size_bytes: int, *, is_ready: bool) -> tuple[float, float] | None:
        """Seconds for the delta and for the full snapshot; None before every rate is measured."""
        if not (self.code_s_per_byte and self.link and self.decode):
            return None
        coding = 0.0 if is_ready else size_bytes * self.code_s_per_byte
        delta = coding + size_bytes * self.delta_share / self.link + size_bytes / self.decode
        return delta, size_bytes / self.link


class TransferChoice:
    """The choices of one policy's publisher."""

    def __init__(self) -> None:
        self.rates = MeasuredRates()
        self._choices: dict[int, Choice] = {}
        self._told: set[tuple[int, str]] = set()
        self._last_wanted = -_IDLE_VERSIONS - 1  # the newest version for which a receiver on another host had a base

    def note_receiver(self, rates: ReceiverRates) -> None:
        """Note the rates that a receiver measured."""
        self.rates.link = _mean(self.rates.link, rates.link)
        self.rates.decode = _mean(self.rates.decode, rates.decode)

    def note_delta(self, *, size_bytes: int, full_bytes: int, code_s: float) -> None:
        """Note a coded delta between consecutive versions."""
        self.rates.code_s_per_byte = _mean(self.rates.code_s_per_byte, code_s / max(1, full_bytes))
        self.rates.delta_share = _mean(self.rates.delta_share, size_bytes / max(1, full_bytes))

    def codes_in_advance(self, version: int) -> bool:
        """Whether receivers are expected to fetch a delta to ``version``."""
        last = self._choices.get(self._last_wanted)
        return version - self._last_wanted <= _IDLE_VERSIONS and (last is None or last.encoding is Encoding.DELTA)

    def choose(self, version: int, size_bytes: int, *, can_map: bool, is_ready: bool) -> Choice:
        """The choice for a receiver that holds a base. ``is_ready``: the delta is coded."""
        if can_map:
            return self._tell(version, Choice(Encoding.FULL, "mapped on one host"))
        self._last_wanted = max(self._last_wanted, version)
        known = self._choices.get(version)
        if known is not None:
            return known
        costs = self.rates.costs_s(size_bytes, is_ready=is_ready)
        if costs is None:
            chosen = Choice(Encoding.DELTA, "delta, rates not measured")
        else:
            delta_s, full_s = costs
            cheaper = Encoding.DELTA if delta_s <= full_s else Encoding.FULL
            chosen = Choice(cheaper, f"{cheaper.value}: delta {delta_s:.3g} s, full {full_s:.3g} s")
        self._choices[version] = chosen
        while len(self._choices) > _KEPT_CHOICES:
            del self._choices[min(self._choices)]
        return self._tell(version, chosen)

    def _tell(self, version: int, choice: Choice) -> Choice:
        if (version, choice.reason) not in self._told:
            self._told = {told for told in self._told if told[0] > version - _KEPT_CHOICES} | {(version, choice.reason)}
            log.info(
                LogEvent.TRANSFER_CHOSEN,
                version=version,
                encoding=choice.encoding.value,
                reason=choice.reason,
                link_bytes_per_s=round(self.rates.link),
                decode_bytes_per_s=round(self.rates.decode),
                code_s_per_gb=round(self.rates.code_s_per_byte * 1e9, 3),
                delta_share=round(self.rates.delta_share, 4),
            )
        return choice


def _mean(mean: float, value: float) -> float:
    if value <= 0:
        return mean
    return value if not mean else mean + _NEWEST_WEIGHT * (value - mean)
