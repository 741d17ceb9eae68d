"""Where the time of each component went, and for whom it waited: its three largest activities, as a table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from rich.table import Table
from rich.text import Text

from services.common.pb import account_pb2

LARGEST = 3
LEAST_SHARE = 0.005  # of what is shown


def time_table(shares: Mapping[str, Mapping[str, float]]) -> Table:
    """``shares``: component -> "activity" or "activity -> component waited for" -> share of its time, largest first."""
    table = Table(box=None, pad_edge=True, header_style="dim")
    table.add_column("component", no_wrap=True)
    for heading in ("where the time went", *[""] * (LARGEST - 1)):
        table.add_column(heading)
    for component, of_one in shares.items():
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
