"""A process takes up the keys of its role, refuses other files, and follows a renewal."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from services.cli.keys import Keyring
from services.common.errors import ConfigError
from services.common.security import identity
from services.common.security.keys import VARIABLE, Role, without_keys
from tests.keys import as_role, make_keys


@pytest.fixture
def keys(tmp_path: Path) -> Keyring:
    return make_keys(tmp_path / "keys")


def configured(where: Path, *roles: Role) -> identity.Identity | None:
    try:
        return identity.configure(*roles, environment={VARIABLE: str(where)})
    finally:
        identity.configure(Role.OPERATOR, environment={})


def test_the_variable_names_a_bundle_or_the_directory_of_bundles(keys: Keyring) -> None:
    for where in (keys.folder, keys.folder / "inference"):
        found = configured(where, Role.INFERENCE)
        assert found is not None
        assert (found.role, found.run) == (Role.INFERENCE, "r1")


def test_a_process_hands_on_what_those_it_starts_need(keys: Keyring) -> None:
    for where, role in (("trainer", Role.PUBLISHER), ("inference", Role.AGENT)):
        found = configured(keys.folder / where, role)
        assert found is not None and found.role is role


def test_another_roles_keys_are_not_taken(keys: Keyring) -> None:
    with pytest.raises(ConfigError, match="keys of role viewer, but this process is orchestrator"):
        configured(keys.folder / "viewer", Role.ORCHESTRATOR)
    with pytest.raises(ConfigError, match="there are no keys of role trainer"):
        configured(keys.folder / "viewer" / "nowhere", Role.TRAINER)


@pytest.mark.parametrize("name", ["ca.pem", "cert.pem", "key.pem", "token", "token.pub", "bundle.json"])
def test_a_bundle_that_was_copied_in_part_names_what_is_missing(keys: Keyring, name: str) -> None:
    (keys.folder / "trainer" / name).unlink()
    with pytest.raises(ConfigError, match=rf"{name}|no keys of role trainer"):
        identity.load(keys.folder / "trainer", Role.TRAINER)


def test_a_secret_that_everybody_may_read_is_refused(keys: Keyring) -> None:
    (keys.folder / "trainer" / "key.pem").chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        as_role(keys, Role.TRAINER)


@contextmanager
def somebody_else(keys: Keyring) -> Iterator[None]:
    """For as long as this lasts, the keys are another user's."""
    if os.geteuid() == 0:  # whom no mode keeps out
        os.seteuid(65534)
        try:
            yield
        finally:
            os.seteuid(0)
    else:
        keys.folder.chmod(0)
        try:
            yield
        finally:
            keys.folder.chmod(0o700)


def test_keys_of_another_user_are_refused_with_what_to_do(keys: Keyring) -> None:
    with somebody_else(keys):
        for where in (keys.folder, keys.folder / "inference"):
            with pytest.raises(ConfigError, match=f"user {os.geteuid()} may not read it.*chown -R"):
                configured(where, Role.INFERENCE)


def test_a_key_of_another_certificate_is_refused(keys: Keyring) -> None:
    shutil.copy(keys.folder / "viewer" / "key.pem", keys.folder / "trainer" / "key.pem")
    with pytest.raises(ConfigError, match="is not the key of"):
        as_role(keys, Role.TRAINER)


@pytest.mark.parametrize("name", ["cert.pem", "key.pem", "bundle.json"])
def test_files_that_hold_something_else_are_refused_by_name(keys: Keyring, name: str) -> None:
    (keys.folder / "trainer" / name).write_bytes(b"nonsense")
    with pytest.raises(ConfigError, match=name):
        as_role(keys, Role.TRAINER)


def test_renewed_files_are_taken_up_and_broken_ones_are_not(keys: Keyring) -> None:
    who = as_role(keys, Role.TRAINER)
    before = who.bundle.certificate
    keys.renew(days=60)
    who.refresh()
    after = who.bundle.certificate
    assert after != before and who.generation == 1
    (keys.folder / "trainer" / "cert.pem").write_bytes(b"half a cert")
    with capture_logs() as logs:
        who.refresh()
        who.refresh()
    assert who.bundle.certificate == after and who.generation == 1
    assert [each["event"] for each in logs] == ["keys.not_renewed"]
    other = make_keys(keys.folder.parent / "other", "r2")
    for file in (other.folder / "trainer").glob("*.*"):
        shutil.copy(file, keys.folder / "trainer" / file.name)
    who.refresh()
    assert who.run == "r1" and who.bundle.certificate == after


def test_programs_that_are_not_the_runs_own_do_not_see_where_keys_are() -> None:
    assert without_keys({VARIABLE: "/keys", "PATH": "/bin"}) == {"PATH": "/bin"}


def test_what_holds_secrets_does_not_print_them(keys: Keyring) -> None:
    who = as_role(keys, Role.TRAINER)
    assert who.bundle.token not in repr((who, who.bundle, vars(who)))
    assert "PRIVATE" not in repr((who, who.bundle, vars(who)))


@pytest.mark.parametrize("file", ["ca.pem", "cert.pem", "key.pem", "token", "token.pub"])
def test_files_that_were_cut_off_are_named(keys: Keyring, file: str) -> None:
    target = keys.folder / "operator" / file
    target.write_bytes(target.read_bytes()[:100])
    with pytest.raises(ConfigError, match=f"operator/{file}|{file} "):
        configured(keys.folder, Role.OPERATOR)


@pytest.mark.parametrize("file", ["token", "token.pub"])
def test_files_of_another_run_are_told_from_the_runs_own(keys: Keyring, tmp_path: Path, file: str) -> None:
    other = make_keys(tmp_path / "other")
    shutil.copyfile(other.folder / "operator" / file, keys.folder / "operator" / file)
    with pytest.raises(ConfigError, match="copy the whole directory of the role"):
        configured(keys.folder, Role.OPERATOR)


def test_a_directory_that_does_not_exist_is_told_as_such(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere, which does not exist"):
        configured(tmp_path / "nowhere", Role.OPERATOR)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="file, which is no directory"):
        configured(tmp_path / "file", Role.OPERATOR)
