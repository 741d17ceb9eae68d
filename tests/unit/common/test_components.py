"""Names of components: every part is found again in the built name."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common.telemetry import accounts
from services.common.telemetry.accounts import NOBODY, ActivityName, Component, TrainerState

NAMES = st.text("abcz0123-_.", min_size=1, max_size=12)


@given(NAMES, NAMES)
def test_a_part_is_split_into_its_replica_and_what_it_is(replica_id: str, policy: str) -> None:
    whole = accounts.replica(replica_id)
    for inner in (accounts.weights(policy), accounts.engine(policy)):
        assert accounts.split(accounts.part(whole, inner)) == (whole, inner)
    assert accounts.split(accounts.records(whole)) == (whole, Component("records"))
    assert accounts.split(whole) == (whole, NOBODY)


@given(NAMES, NAMES, st.integers(1, 99))
def test_each_component_is_of_one_kind(replica_id: str, policy: str, rank: int) -> None:
    whole = accounts.replica(replica_id)
    kinds = {
        whole: accounts.is_replica,
        accounts.records(whole): accounts.is_records,
        accounts.part(whole, accounts.weights(policy)): accounts.is_weights,
        accounts.trainer_component(policy, rank): accounts.is_of_trainer,
        accounts.publisher(policy): accounts.is_publisher,
    }
    for component, kind in kinds.items():
        assert [found for found in kinds.values() if found(component)] == [kind]
    assert accounts.replica_id(whole) == replica_id


@pytest.mark.parametrize("state", TrainerState)
def test_every_state_of_a_trainer_is_an_activity(state: TrainerState) -> None:
    assert state.name in ActivityName.__members__
