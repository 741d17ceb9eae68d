"""Shows the three largest activities of each component and the awaited component, as a table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from rich.table import Table
from rich.text import Text

from services.common.pb import account_pb2
from services.common.telemetry.activities import ActivityName

LARGEST = 3
LEAST_SHARE = 0.005  # of what is shown
_QUIET = (ActivityName.NOT_ASKED, ActivityName.NOTHING_TO_SEND, ActivityName.UP_TO_DATE)
_QUIET_SHARE = 0.9  # of a component that is left out: it waits to be asked, as it should


def time_table(shares: Mapping[str, Mapping[str, float]]) -> Table:
    """``shares``: component -> "activity" or "activity -> component waited for" -> share of its time, largest first. Components that
    were hardly asked for anything are left out."""
    table = Table(box=None, pad_edge=True, header_style="dim")
    table.add_column("component", no_wrap=True)
    for heading in ("where the time went", *[""] * (LARGEST - 1)):
        table.add_column(heading)
    for component, of_one in shares.items():
        if sum(of_one.get(activity, 0.0) for activity in _QUIET) >= _QUIET_SHARE:
            continue
        cells = [f"{share:.0%} {what}" for what, share in list(of_one.items())[:LARGEST] if share >= LEAST_SHARE]
        # As texts: names are peers', and no markup.
        table.add_row(*map(Text, (component, *cells, *[""] * (LARGEST - len(cells)))))
    return table


def shares_of(accounts: Iterable[account_pb2.TimeAccount]) -> dict[str, dict[str, float]]:
    """As ``time_table`` takes them."""
    found: dict[str, dict[str, float]] = {}
    for account in accounts:
        whole = sum(activity.seconds for activity in account.activities) or 1.0
        found[account.component] = {
            f"{activity.activity} -> {activity.on}" if activity.on else activity.activity: activity.seconds / whole
            for activity in sorted(account.activities, key=lambda activity: -activity.seconds)
        }
    return found
