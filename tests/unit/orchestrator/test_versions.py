from __future__ import annotations

import pytest

from services.common.errors import InvalidRequestError, VersionConflictError
from services.common.records import WeightVersion
from services.orchestrator.versions import VersionLedger


def version(number: int, digest: str = "", *sources: str) -> WeightVersion:
    return WeightVersion(policy="model0", number=number, digest=digest or f"d{number}", sources=sources)


def test_another_digest_for_the_same_number_is_refused() -> None:
    ledger = VersionLedger("model0")
    ledger.record(version(0))
    with pytest.raises(VersionConflictError, match="has digest d0, not other"):
        ledger.record(version(0, "other"))
    assert ledger.knows(0, "d0")
    assert not ledger.knows(0, "other")


def test_repeating_is_harmless_and_refreshes_addresses() -> None:
    ledger = VersionLedger("model0")
    assert ledger.record(version(0, "", "old:1"))
    assert not ledger.record(version(0, "", "new:1"))
    assert ledger.newest is not None
    assert ledger.newest.sources == ("new:1",)
    assert not ledger.record(version(0))
    assert ledger.newest.sources == ("new:1",)


def test_numbers_leave_no_gap() -> None:
    ledger = VersionLedger("model0")
    assert ledger.newest_number == -1
    with pytest.raises(InvalidRequestError, match="version 1 of model0 cannot follow version -1"):
        ledger.record(version(1))
