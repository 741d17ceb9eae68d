"""A token proves one role in one run until one moment; a changed, cut or forged token is refused."""

from __future__ import annotations

import base64
import hashlib
import hmac
import math

import jwt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.errors import ConfigError, UnauthenticatedError
from services.common.security import tokens
from services.common.security.certificates import make_key, public_part
from services.common.security.keys import LEEWAY_S, Holder, Role

KEY = make_key()
PUBLIC = public_part(KEY)
NOW = 1_790_000_000.0


def check(token: str, now: float = NOW, run: str = "r1") -> Holder:
    return tokens.check(token, PUBLIC, run, now)


@settings(max_examples=30)
@given(st.sampled_from(Role), st.text(max_size=40), st.floats(0.01, 10_000))
def test_what_was_minted_is_what_is_read(role: Role, run: str, hours: float) -> None:
    claims = tokens.check(tokens.mint(KEY, run, role, NOW, hours), PUBLIC, run, NOW)
    assert (claims.run, claims.role) == (run, role)
    assert abs(claims.ends_at - (NOW + hours * 3600)) <= 1


@given(st.data())
def test_a_token_with_one_character_changed_is_refused(data: st.DataObject) -> None:
    token = tokens.mint(KEY, "r1", Role.VIEWER, NOW, 1)
    place = data.draw(st.integers(0, len(token) - 2))  # the last one may hold unused bits
    other = data.draw(st.sampled_from("ABCDEFGHIJKLMNOPabcdefghijklmnop0123456789-_."))
    changed = token[:place] + other + token[place + 1 :]
    if changed != token:
        with pytest.raises(UnauthenticatedError):
            check(changed)


@given(st.text(max_size=300) | st.binary(max_size=300).map(lambda raw: raw.decode("latin-1")))
def test_no_text_is_taken_for_a_token(text: str) -> None:
    with pytest.raises(UnauthenticatedError):
        check(text)


@pytest.mark.parametrize(
    ("now", "refused"),
    [
        (NOW + 3600 + LEEWAY_S + 2, "expired at .*the clock here says"),
        (NOW - LEEWAY_S - 2, "62 s before: set the clocks"),
        (NOW + 3600 + LEEWAY_S - 2, None),
        (NOW - LEEWAY_S + 2, None),
    ],
)
def test_time_counts_with_a_leeway(now: float, refused: str | None) -> None:
    token = tokens.mint(KEY, "r1", Role.VIEWER, NOW, 1)
    if refused is None:
        assert check(token, now).role is Role.VIEWER
    else:
        with pytest.raises(UnauthenticatedError, match=refused):
            check(token, now)


def claims(**changes: object) -> dict[str, object]:
    said = {"iss": "rollmill", "run": "r1", "role": "viewer", "iat": int(NOW), "exp": int(NOW + 60), "jti": "x"}
    return {name: value for name, value in {**said, **changes}.items() if value is not None}


@pytest.mark.parametrize(
    "changes",
    [
        {"role": "root"}, {"role": None}, {"exp": None}, {"run": None}, {"jti": None}, {"iss": "another"},
        {"exp": "soon"}, {"iat": [1]}, {"role": ["operator"]},
    ],
)  # fmt: skip
def test_claims_that_are_missing_or_unknown_are_refused(changes: dict[str, object]) -> None:
    with pytest.raises(UnauthenticatedError):
        check(jwt.encode(claims(**changes), KEY, algorithm="ES256"))


def test_only_the_runs_own_algorithm_is_taken() -> None:
    with pytest.raises(UnauthenticatedError):
        check(jwt.encode(claims(), "", algorithm="none"))
    # The public key, which everybody may know, taken for a shared secret.
    signed = jwt.encode(claims(), "x" * 32, algorithm="HS256").rpartition(".")[0]
    signature = base64.urlsafe_b64encode(hmac.new(PUBLIC, signed.encode(), hashlib.sha256).digest()).rstrip(b"=")
    with pytest.raises(UnauthenticatedError):
        check(f"{signed}.{signature.decode()}")


def test_another_run_and_its_key_are_refused() -> None:
    with pytest.raises(UnauthenticatedError, match="another run's key"):
        check(tokens.mint(make_key(), "r1", Role.OPERATOR, NOW, 1))
    with pytest.raises(UnauthenticatedError, match="of another run"):
        check(tokens.mint(KEY, "r1", Role.OPERATOR, NOW, 1), run="r2")


ABSURD = [
    math.inf, -math.inf, math.nan, 1e300, 1e10, NOW + 3600.0, NOW + 0.5, True, False, None, "", str(NOW + 3600), "Infinity",
    [NOW + 3600], {"at": NOW}, -1, 10**12, 10**30, 253_402_300_800, int(NOW + tokens.LONGEST_S) + 1,
]  # fmt: skip


@pytest.mark.parametrize("moment", ABSURD, ids=repr)
@pytest.mark.parametrize("name", ["exp", "iat"])
def test_a_time_that_is_none_is_refused_though_it_is_signed(name: str, moment: object) -> None:
    times = {"iat": int(NOW), "exp": int(NOW) + 3600, name: moment}
    for now in (NOW, 0.0, 1e12):
        with pytest.raises(UnauthenticatedError):
            check(jwt.encode(claims(**times), KEY, algorithm="ES256"), now)


def test_a_token_that_ends_before_it_begins_is_refused() -> None:
    with pytest.raises(UnauthenticatedError, match="no run token"):
        check(jwt.encode(claims(iat=int(NOW), exp=int(NOW) - 1), KEY, algorithm="ES256"))


@pytest.mark.parametrize("name", ["run", "jti", "role"])
@pytest.mark.parametrize("said", [1, True, None, ["r1"], {"r1": 1}])
def test_a_name_that_is_no_text_is_refused(name: str, said: object) -> None:
    with pytest.raises(UnauthenticatedError, match="no run token"):
        check(jwt.encode(claims(**{name: said}), KEY, algorithm="ES256"))


@pytest.mark.parametrize("hours", [math.inf, math.nan, 1e9, -1.0, tokens.LONGEST_S / 3600 + 1])
def test_no_token_is_made_that_nobody_would_take(hours: float) -> None:
    with pytest.raises(ConfigError, match="hours"):
        tokens.mint(KEY, "r1", Role.VIEWER, NOW, hours)
