"""The reward files of a Harbor verifier: one number, or no reward at all."""

from __future__ import annotations

import base64

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extras.hub.harbor_episode import reward_of, why_not
from services.envgateway.envs.base import EpisodeLostError


def files(json: str | None = None, txt: str | None = None) -> dict[str, str | None]:
    return {
        name: None if text is None else base64.b64encode(text.encode()).decode()
        for name, text in (("reward.json", json), ("reward.txt", txt))
    }


def test_json_goes_before_text_and_its_other_numbers_are_metrics() -> None:
    assert reward_of(files('{"reward": 0.5, "style": 1}', "1"), "a") == (0.5, {"reward_style": 1.0})
    assert reward_of(files('{"tests": 3}'), "a") == (3.0, {})
    assert reward_of(files(None, " 0.25\n"), "a") == (0.25, {})


@pytest.mark.parametrize(
    ("json", "txt"),
    [
        (None, None), (None, ""), (None, "one"), (None, "inf"), (None, "1 2"), ("", "1"), ("[]", None), ("{}", None),
        ("{", None), ('{"a": 1, "b": 2}', None), ('{"reward": "1"}', None), ('{"reward": true}', None),
        ('{"reward": NaN}', None), ('{"reward": 1, "b": null}', None), ("[" * 20_000, None),
    ],
)  # fmt: skip
def test_anything_else_is_no_reward(json: str | None, txt: str | None) -> None:
    with pytest.raises(EpisodeLostError, match=r"^task a: "):
        reward_of(files(json, txt), "a")


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_a_number_is_read_as_it_was_written(value: float) -> None:
    assert reward_of(files(None, repr(value)), "a") == (value, {})


def test_only_tier_2_has_a_root_for_the_tasks() -> None:
    assert why_not("2") == ""
    assert "it runs at tier U" in why_not("U")
