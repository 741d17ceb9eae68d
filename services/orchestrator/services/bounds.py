"""Bounds of the reports of peers, checked before a value enters memory, the journal or metrics.

Identities, versions and counts affect decisions: the orchestrator refuses an impossible value with a reason. Other
values are for display: long texts are cut and invalid numbers dropped, because a lease is worth more than a gauge.
Independent of the core and of protobuf.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from services.common.errors import InvalidRequestError
from services.common.records import Interval, WeightTransfer, WeightVersion
from services.common.telemetry.accounts import AccountState, ActivityTime, PeerState
from services.orchestrator.members import Held

MOST_NAME = 128  # characters of an id
MOST_TEXT = 1024  # characters of a text for people
MOST_REASON = 8192  # of the reason for which a run pauses
MOST_VALUES = 4096  # gauges, metrics, labels of one message
MOST_ACCOUNTS = 256  # of one message; activities of an account
MOST_SLOTS = 1 << 20
MOST_NUMBER = 1 << 53  # of a version or a step
MOST_TOKENS = 10**15  # that a process sampled
MOST_ROWS = (1 << 31) - 1
MOST_RANKS = 1 << 16
FUTURE_S = 3600.0  # by which a peer's clock may be ahead


def check_id(what: str, text: str) -> str:
    """Raises InvalidRequestError for an id that is empty, too long or not printable."""
    if not text or len(text) > MOST_NAME or not text.isprintable():
        raise InvalidRequestError(f"{what} is {text[:MOST_NAME]!r}: it must have 1 to {MOST_NAME} printable characters")
    return text


def check_number(what: str, value: int, least: int, most: int = MOST_NUMBER) -> int:
    """Raises InvalidRequestError for a number outside its range."""
    if not least <= value <= most:
        raise InvalidRequestError(f"{what} is {value}; it must be {least} to {most}")
    return value


def check_held(held: Mapping[str, Held], policies: Collection[str]) -> dict[str, Held]:
    """Raises InvalidRequestError for an unknown policy, or an impossible version."""
    for policy, version in held.items():
        if policy not in policies:
            raise InvalidRequestError(
                f"held_versions names the policy {policy[:MOST_NAME]!r}; this run has {', '.join(sorted(policies))}"
            )
        check_number(f"the held version of {policy}", version.number, -1)
        if len(version.digest) > MOST_NAME:
            raise InvalidRequestError(f"the digest of {policy} has {len(version.digest)} characters")
    return dict(held)


def check_version(version: WeightVersion) -> WeightVersion:
    """Raises InvalidRequestError for an impossible number, digest or address."""
    check_number(f"the version of {version.policy[:MOST_NAME]}", version.number, 0)
    check_id("its digest", version.digest)
    if len(version.sources) > MOST_ACCOUNTS or any(len(source) > MOST_TEXT for source in version.sources):
        raise InvalidRequestError(f"a version has {len(version.sources)} sources, or one with a very long address")
    return version


def texts(labels: Mapping[str, str]) -> dict[str, str]:
    """Facts for display, cut."""
    return {name[:MOST_NAME]: text[:MOST_TEXT] for name, text in list(labels.items())[:MOST_ACCOUNTS]}


def metrics(values: Mapping[str, float]) -> dict[str, float]:
    """Numbers by name, without names that are too long and entries beyond the limit."""
    return _first({name: value for name, value in values.items() if len(name) <= MOST_NAME})


def gauges(values: Mapping[str, float]) -> dict[str, float]:
    """The same without NaN and infinity."""
    return _first(
        {name: value for name, value in values.items() if len(name) <= MOST_NAME and -math.inf < value < math.inf}
    )


def _first(values: dict[str, float]) -> dict[str, float]:
    return values if len(values) <= MOST_VALUES else dict(itertools.islice(values.items(), MOST_VALUES))


def accounts(found: Iterable[AccountState]) -> tuple[AccountState, ...]:
    """Time accounts with short enough names; cuts their details."""
    kept = itertools.islice(found, MOST_ACCOUNTS)
    return tuple([_account(account) for account in kept if len(account.component) <= MOST_TEXT])


def _account(account: AccountState) -> AccountState:
    if len(account.activities) <= MOST_ACCOUNTS and not any(map(_is_long, account.activities)):
        return account
    activities = tuple(
        replace(activity, detail=activity.detail[:MOST_TEXT])
        for activity in account.activities[:MOST_ACCOUNTS]
        if len(activity.name) <= MOST_TEXT and len(activity.on) <= MOST_TEXT
    )
    return replace(account, activities=activities)


def _is_long(activity: ActivityTime) -> bool:
    return len(activity.name) > MOST_TEXT or len(activity.on) > MOST_TEXT or len(activity.detail) > MOST_TEXT


def peers(found: Iterable[PeerState]) -> tuple[PeerState, ...]:
    """Known states of other components, cut in the same way."""
    kept = itertools.islice(found, MOST_ACCOUNTS)
    return tuple([_peer(peer) for peer in kept if len(peer.component) <= MOST_TEXT])


def _peer(peer: PeerState) -> PeerState:
    if not peer.gauges and not peer.accounts and len(peer.address) <= MOST_TEXT and len(peer.detail) <= MOST_TEXT:
        return peer
    return replace(
        peer,
        address=peer.address[:MOST_TEXT],
        detail=peer.detail[:MOST_TEXT],
        gauges=gauges(peer.gauges),
        accounts=accounts(peer.accounts),
    )


def intervals(found: Iterable[Interval], now: float | None = None) -> list[Interval]:
    """Valid intervals: ordered, not before 1970, not in the future of any clock."""
    latest = (time.time() if now is None else now) + FUTURE_S
    return [(begin, end) for begin, end in found if 0.0 <= begin <= end <= latest]


def transfer(found: WeightTransfer) -> WeightTransfer:
    """A weight transfer with its texts cut."""
    return replace(
        found,
        policy=found.policy[:MOST_NAME],
        sources=tuple(source[:MOST_NAME] for source in found.sources[:MOST_ACCOUNTS]),
        error=found.error[:MOST_TEXT],
    )
