"""Names of components: every part is found again in the built name."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common.telemetry import components
from services.common.telemetry.activities import ActivityName, TrainerState
from services.common.telemetry.components import NOBODY, Component

NAMES = st.text("abcz0123-_.", min_size=1, max_size=12)


@given(NAMES, NAMES)
def test_a_part_is_split_into_its_replica_and_what_it_is(replica_id: str, policy: str) -> None:
    whole = components.replica(replica_id)
    for inner in (components.weights(policy), components.engine(policy)):
        assert components.split(components.part(whole, inner)) == (whole, inner)
    assert components.split(components.records(whole)) == (whole, Component("records"))
    assert components.split(whole) == (whole, NOBODY)


@given(NAMES, NAMES, st.integers(1, 99))
def test_each_component_is_of_one_kind(replica_id: str, policy: str, rank: int) -> None:
    whole = components.replica(replica_id)
    kinds = {
        whole: components.is_replica,
        components.records(whole): components.is_records,
        components.part(whole, components.weights(policy)): components.is_weights,
        components.trainer(policy, rank): components.is_of_trainer,
        components.publisher(policy): components.is_publisher,
    }
    for component, kind in kinds.items():
        assert [found for found in kinds.values() if found(component)] == [kind]
    assert components.replica_id(whole) == replica_id


@pytest.mark.parametrize("state", TrainerState)
def test_every_state_of_a_trainer_is_an_activity(state: TrainerState) -> None:
    assert state.name in ActivityName.__members__
