"""Paths through the waits are the shortest ones, and cost one look at the graph for any number of queries."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.telemetry.accounts import AccountState, ActivityTime
from services.common.telemetry.components import ORCHESTRATOR
from services.orchestrator.stalls.facts import Facts
from services.orchestrator.stalls.graph import WaitGraph

NAMES = ("trainer/model0", "publisher/model0", ORCHESTRATOR, "replica/a", "replica/b", "envgateway", "redis", "disk")

waits = st.dictionaries(st.sampled_from(NAMES), st.sets(st.sampled_from(NAMES), max_size=3))


def graph_of(edges: Mapping[str, set[str]]) -> WaitGraph:
    accounts = {
        name: AccountState(
            component=name,
            activities=tuple(ActivityTime(name=f"waits-{on}", on=on, num_now=1) for on in sorted(found)),
        )
        for name, found in edges.items()
    }
    return WaitGraph(Facts(now=0.0, accounts=accounts))


def _shortest(graph: WaitGraph, start: str, target: str) -> list[str] | None:
    """By trying all ways, the shorter ones first."""
    for length in range(len(NAMES) + 1):
        for middle in itertools.permutations([n for n in NAMES if n not in (start, target)], max(0, length - 1)):
            way = [start, *middle, target] if length else []
            if way and all(b in graph._edges.get(a, {}) for a, b in itertools.pairwise(way)):
                return way
    return None


@settings(max_examples=25, deadline=None)
@given(edges=waits, target=st.sampled_from(NAMES), targets=st.sets(st.sampled_from(NAMES), max_size=3))
def test_chains_are_shortest_ways_and_what_leads_to_them_is_what_reaches_them(
    edges: Mapping[str, set[str]], target: str, targets: set[str]
) -> None:
    graph = graph_of(edges)
    starts = [s for s in ("trainer/model0", ORCHESTRATOR) if s in graph._edges]
    ways = [way for s in starts if (way := _shortest(graph, s, target)) is not None]
    chain = graph.chain(target)
    assert len(chain) == (len(ways[0]) - 1 if ways else 0)
    if ways:
        assert chain[0].startswith(f"{ways[0][0]} waits for ") and f" waits for {target}: " in chain[-1]
    reached = {n for n in NAMES if any(_shortest(graph, n, t) is not None for t in targets)}
    assert {n for n in NAMES if n in graph.leading_to(targets)} == reached | targets
