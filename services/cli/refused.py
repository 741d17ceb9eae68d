"""A warning about records that the orchestrator did not take, made from the counters of the run."""

from __future__ import annotations

from collections.abc import Mapping

from services.common.refusals import RefusalReason, counter_of


def refusal_warning(counters: Mapping[str, int]) -> str:
    """One line with the reasons, most first; empty while every record was taken.

    >>> refusal_warning({"refused_token_id": 3, "refused_reward": 1, "failures_timeout": 2})
    'refused records: 4, most because of token_id (token_id 3, reward 1); docs/protocol.md has the bounds'
    """
    found = {reason.value: counters.get(counter_of(reason), 0) for reason in RefusalReason}
    refused = sorted(((count, name) for name, count in found.items() if count), reverse=True)
    if not refused:
        return ""
    listed = ", ".join(f"{name} {count}" for count, name in refused)
    number = sum(count for count, _ in refused)
    return f"refused records: {number}, most because of {refused[0][1]} ({listed}); docs/protocol.md has the bounds"
