"""When a run has keys: the settings of the recipe, and the refused ones."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from services.cli.keys import KEYS, Keyring, keys_of
from services.common.config.loading import load_recipe
from services.common.config.recipe import Recipe
from services.common.errors import ConfigError
from services.common.security.keys import VARIABLE

QUICKSTART = Path("recipes/quickstart")


def recipe(*overrides: str) -> Recipe:
    return load_recipe(QUICKSTART, ["run.id=r1", *overrides], {})


@pytest.mark.parametrize(
    ("overrides", "needs"),
    [
        ((), False),
        (("security.tls=on",), True),
        (("security.tls=off",), False),
        (("orchestrator.host=0.0.0.0",), True),
        (("inference.a.host=10.0.0.1",), True),
        (('envgateway.host="::"',), True),
        (("policies.model0.weights.host=node0",), True),
        (("orchestrator.host=::1",), False),
    ],
)
def test_keys_are_needed_as_soon_as_others_reach_a_service(overrides: tuple[str, ...], needs: bool) -> None:
    found = recipe(*overrides)
    assert found.needs_keys is needs
    assert found.digest_algorithm() == ("blake3" if not found.is_on_loopback else "xxh3-128")


def test_tls_cannot_be_turned_off_where_others_reach_a_service() -> None:
    with pytest.raises(ConfigError, match=r"security.tls is off, but envgateway.host is 0.0.0.0"):
        recipe("security.tls=off", "envgateway.host=0.0.0.0")


@pytest.mark.parametrize("word", ["on", "off", "auto", "true", '"on"'])
def test_yamls_own_reading_of_on_and_off_is_understood(word: str) -> None:
    expected = {"true": "on", '"on"': "on"}.get(word, word)
    assert recipe(f"security.tls={word}").security.tls == expected
    assert yaml.safe_load("tls: on") == {"tls": True}, "this is why"


def test_the_launcher_makes_keys_once_and_none_where_none_are_needed(tmp_path: Path) -> None:
    assert keys_of(recipe(), tmp_path, {}) is None
    assert not (tmp_path / KEYS).exists()
    folder = keys_of(recipe("security.tls=on", "security.client_certificates=true"), tmp_path, {})
    assert folder == tmp_path / KEYS
    ring = Keyring(folder)
    assert (ring.run, ring.client_certificates) == ("r1", True)
    before = (folder / "ca.pem").read_bytes()
    assert keys_of(recipe("security.tls=on"), tmp_path, {VARIABLE: "/elsewhere"}) == folder
    assert (folder / "ca.pem").read_bytes() == before


def test_keys_that_are_given_are_used_unless_tls_is_off(tmp_path: Path) -> None:
    given = {VARIABLE: str(tmp_path / "given")}
    assert keys_of(recipe(), tmp_path, given) == tmp_path / "given"
    assert keys_of(recipe("security.tls=off"), tmp_path, given) is None
