"""``rollmill keys`` and the keys of a run: files and permissions, one role for each process, and no key lost or shown by accident."""

from __future__ import annotations

import io
import os
import stat
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from click.testing import Result
from cryptography import x509
from rich.console import Console
from typer.testing import CliRunner

from services.cli.__main__ import app
from services.cli.keys import (
    Keyring,
    check_dates,
    entries,
    keys_of,
    keys_of_process,
    renew_in_time,
    with_keys,
    write_bundles,
)
from services.cli.plan import commands_for_other_nodes, plan
from services.common.config.loading import load_recipe, load_resolved, save_resolved
from services.common.config.recipe import Recipe
from services.common.errors import ConfigError, UnauthenticatedError
from services.common.security import identity
from services.common.security.certificates import holder_of
from services.common.security.keys import Role
from services.common.security.tokens import check, read
from tests.keys import make_keys
from tests.waiting import WAIT_S

RECIPE = "recipes/quickstart"


def keys(*arguments: object, fails: bool = False) -> Result:
    result = CliRunner().invoke(app, ["keys", *map(str, arguments)])
    if fails:
        assert result.exception is not None
    else:
        assert result.exit_code == 0, result.output
    return result


def test_a_recipe_gets_one_bundle_for_every_role(tmp_path: Path) -> None:
    keys(RECIPE, "-o", tmp_path / "k", "--host", "node7", "--host", "10.0.0.7", "--days", 3)
    found = {str(e.folder.relative_to(tmp_path / "k")): e for e in entries(tmp_path / "k")}
    assert set(found) == {
        "orchestrator", "envgateway", "inference", "inference/agent", "trainer", "trainer/publisher", "operator", "viewer",
        "agent", "client",
    }  # fmt: skip
    for entry in found.values():
        assert entry.run == "quickstart"
        assert abs(entry.ends_at - time.time() - 3 * 86400) < 60
    pem = (tmp_path / "k" / "orchestrator" / "cert.pem").read_bytes()
    names = x509.load_pem_x509_certificate(pem).extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert {"node7", "localhost", "orchestrator.rollmill.internal"} <= set(names.get_values_for_type(x509.DNSName))
    assert "10.0.0.7" in {str(each) for each in names.get_values_for_type(x509.IPAddress)}


def test_settings_of_the_command_line_count_for_a_recipe_and_not_for_a_run(tmp_path: Path) -> None:
    keys(RECIPE, "-o", tmp_path / "k", "--set", "run.id=night")
    assert {entry.run for entry in entries(tmp_path / "k")} == {"night"}
    run_dir = tmp_path / "run"
    save_resolved(load_recipe(Path(RECIPE), ["run.id=run"], {}), run_dir)
    refused = keys(run_dir, "--set", "run.id=night", fails=True)
    assert isinstance(refused.exception, ConfigError) and "leave out --set" in refused.exception.message


def test_nobody_but_the_owner_reads_any_of_it(tmp_path: Path) -> None:
    make_keys(tmp_path / "k")
    for path in [tmp_path / "k", *(tmp_path / "k").rglob("*")]:
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode == (0o700 if path.is_dir() else 0o600), path


def test_no_bundle_can_make_an_identity(tmp_path: Path) -> None:
    """The authority's key and the tokens' stay at the top."""
    ring = make_keys(tmp_path / "k")
    secrets = [(ring.folder / name).read_bytes() for name in ("ca.key", "token.key")]
    for path in ring.folder.rglob("*"):
        if path.is_file() and path.parent != ring.folder:
            assert all(secret not in path.read_bytes() for secret in secrets)
    certificate = x509.load_pem_x509_certificate((ring.folder / "trainer" / "cert.pem").read_bytes())
    assert not certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca


def test_roles_that_serve_nothing_cannot_answer_as_a_service(tmp_path: Path) -> None:
    ring = make_keys(tmp_path / "k")
    for name in ("operator", "viewer", "agent", "client"):
        certificate = x509.load_pem_x509_certificate((ring.folder / name / "cert.pem").read_bytes())
        uses = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
        assert x509.ExtendedKeyUsageOID.SERVER_AUTH not in uses


def test_keys_are_never_overwritten_and_renewing_keeps_the_authority(tmp_path: Path) -> None:
    folder = tmp_path / "k"
    keys(RECIPE, "-o", folder)
    authority, old = (folder / "ca.pem").read_bytes(), (folder / "viewer" / "cert.pem").read_bytes()
    assert isinstance(keys(RECIPE, "-o", folder, fails=True).exception, ConfigError)
    assert (folder / "viewer" / "cert.pem").read_bytes() == old
    keys(RECIPE, "-o", folder, "--renew", "--days", 60, "--host", "node9")
    assert (folder / "ca.pem").read_bytes() == authority
    new = (folder / "viewer" / "cert.pem").read_bytes()
    assert holder_of(new).ends_at > holder_of(old).ends_at + 25 * 86400
    assert Keyring(folder).hosts == ["node9"]


def test_show_says_who_and_until_when_of_a_whole_ring_or_a_copied_bundle_and_prints_no_secret(tmp_path: Path) -> None:
    ring = make_keys(tmp_path / "k")
    for folder in (ring.folder, ring.folder / "trainer"):
        shown = keys("show", folder).output
        assert "trainer" in shown and "UTC" in shown and "r1" in shown
        assert "eyJ" not in shown and "PRIVATE" not in shown
    Keyring(ring.folder, clock=lambda: time.time() - 40 * 86400).renew(days=1)
    assert "expired" in keys("show", ring.folder).output


def test_a_token_more_is_of_the_role_and_the_hours_asked_for(tmp_path: Path) -> None:
    ring = make_keys(tmp_path / "k")
    token = keys("token", ring.folder, "--role", "agent", "--hours", 2).output.strip()
    claims = check(token, (ring.folder / "token.pub").read_bytes(), "r1", time.time())
    assert claims.role is Role.AGENT
    assert abs(claims.ends_at - time.time() - 7200) < 60
    assert read(token).name != read(keys("token", ring.folder, "--role", "agent").output.strip()).name


def test_a_bundle_that_was_copied_makes_no_token(tmp_path: Path) -> None:
    ring = make_keys(tmp_path / "k")
    failure = keys("token", ring.folder / "operator", fails=True).exception
    assert isinstance(failure, ConfigError)


def test_certificates_do_not_outlive_their_authority(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="outlive the authority"):
        make_keys(tmp_path / "k", days=10_000)


@pytest.mark.parametrize("host", ["nödé", "a b", ""])
def test_a_host_that_is_none_is_refused(tmp_path: Path, host: str) -> None:
    with pytest.raises(ConfigError, match="neither an address nor"):
        make_keys(tmp_path / "k", hosts=[host])
    assert not (tmp_path / "k").exists()


@pytest.mark.parametrize(("days_ago", "told"), [(40, "expired at .*--renew"), (-5, "set the clocks")])
def test_keys_that_cannot_be_renewed_here_are_refused_before_a_start(tmp_path: Path, days_ago: int, told: str) -> None:
    made = Keyring.make(tmp_path / "k", "r1", days=10, clock=lambda: time.time() - days_ago * 86400)
    with pytest.raises(UnauthenticatedError, match=told):
        check_dates(identity.load(made.folder, Role.OPERATOR))
    check_dates(None)


# --- keys of a run over two nodes

REPOSITORY = Path(__file__).resolve().parents[3]
TWO_NODES = REPOSITORY / "recipes/code-multi-agent/qwen3-8b-codegen-verifier-m2po-full-2node"
NODE_0 = "orchestrator.host=192.0.2.17"  # as node 0 fills in
VARIABLE = "ROLLMILL_KEYS"


def two_nodes(run_dir: Path, *settings: str) -> Recipe:
    recipe = load_recipe(TWO_NODES, (f"run.id={run_dir.name}", NODE_0, *settings), {})
    save_resolved(recipe, run_dir)
    return recipe


def keys_of_run(recipe: Recipe, run_dir: Path, environment: dict[str, str]) -> Path | None:
    """As ``rollmill run`` does."""
    keys = keys_of(recipe, run_dir, environment)
    if keys is not None:
        renew_in_time(keys)
        write_bundles(recipe, run_dir, keys)
    return keys


def test_each_process_gets_the_keys_of_its_role_and_no_others(tmp_path: Path) -> None:
    recipe = two_nodes(tmp_path)
    keys = keys_of_run(recipe, tmp_path, {})
    assert keys == tmp_path / "keys"
    for spec in (with_keys(spec, keys) for spec in plan(recipe, tmp_path)):
        role = Role(spec.name.partition("-")[0])
        found = identity.load(Path(spec.env[VARIABLE]), role)
        assert (found.role, found.run) == (role, tmp_path.name)
    trainer = with_keys(next(spec for spec in plan(recipe, tmp_path) if spec.name == "trainer-model0"), keys)
    assert identity.load(Path(trainer.env[VARIABLE]), Role.PUBLISHER).role is Role.PUBLISHER, "which it starts"


def test_the_bundle_of_node_1_holds_the_settings_and_one_role(tmp_path: Path) -> None:
    recipe = two_nodes(tmp_path)
    keys_of_run(recipe, tmp_path, {})
    bundle = tmp_path / "nodes" / "1"
    assert load_resolved(bundle) == recipe
    assert identity.load(bundle / "keys", Role.INFERENCE).run == tmp_path.name
    keys = {path.relative_to(bundle / "keys").as_posix() for path in (bundle / "keys").rglob("*") if path.is_file()}
    assert keys and all(key.startswith("inference/") for key in keys)
    assert not [path for path in (tmp_path / "nodes").rglob("*") if path.name in ("ca.key", "token.key")]
    assert stat.S_IMODE((tmp_path / "nodes").stat().st_mode) == 0o700
    assert stat.S_IMODE((bundle / "keys" / "inference" / "key.pem").stat().st_mode) == 0o600


def test_starting_checkpoints_that_the_run_makes_are_part_of_the_bundle(tmp_path: Path) -> None:
    """Also after the copy was prepared: they are made later."""
    recipe = load_recipe(
        REPOSITORY / "recipes/quickstart", (f"run.id={tmp_path.name}", NODE_0, "inference.a.node=1"), {}
    )
    keys_of_run(recipe, tmp_path, {})
    (tmp_path / "warm_start" / "model0").mkdir(parents=True)
    (tmp_path / "warm_start" / "model0" / "config.json").write_text("{}")
    keys_of_run(recipe, tmp_path, {})
    link = tmp_path / "nodes" / "1" / "warm_start" / "model0"
    assert (link / "config.json").read_text() == "{}" and not os.readlink(link).startswith("/")


def test_processes_that_come_at_once_share_one_set_of_keys(tmp_path: Path) -> None:
    recipe = two_nodes(tmp_path)
    with ThreadPoolExecutor(4) as pool:
        assert set(pool.map(lambda _: keys_of(recipe, tmp_path, {}), range(8))) == {tmp_path / "keys"}
    authority = (tmp_path / "keys" / "ca.pem").read_bytes()
    for role in (Role.ORCHESTRATOR, Role.INFERENCE, Role.TRAINER):
        assert identity.load(tmp_path / "keys", role).bundle.ca == authority
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".keys")] == []


def test_a_run_that_goes_on_keeps_its_keys_and_renews_them_before_they_end(tmp_path: Path) -> None:
    recipe = two_nodes(tmp_path)
    keys_of_run(recipe, tmp_path, {})
    first = (tmp_path / "keys" / "inference" / "cert.pem").read_bytes()
    keys_of_run(recipe, tmp_path, {})
    assert (tmp_path / "keys" / "inference" / "cert.pem").read_bytes() == first
    Keyring(tmp_path / "keys", clock=lambda: time.time() - 20 * 86400).renew(days=25)
    keys_of_run(recipe, tmp_path, {})
    renewed = identity.load(tmp_path / "nodes" / "1" / "keys", Role.INFERENCE)
    assert renewed.ends_at - time.time() > 20 * 86400, "in the bundle as well"


def test_a_process_of_node_1_without_its_bundle_is_told_where_to_get_it(tmp_path: Path) -> None:
    console = Console(file=io.StringIO())
    with pytest.raises(
        ConfigError, match=r"inference-a runs on node 1 .* copy its bundle from node 0 and set ROLLMILL_KEYS"
    ):
        keys_of_process(two_nodes(tmp_path), "inference-a", 1, tmp_path, console, {})


def test_a_process_of_node_0_waits_until_the_orchestrator_has_made_the_keys(tmp_path: Path) -> None:
    recipe, console = two_nodes(tmp_path), Console(file=io.StringIO(), width=300)
    maker = threading.Timer(0.3, keys_of_run, (recipe, tmp_path, {}))
    maker.start()
    assert keys_of_process(recipe, "inference-b", 0, tmp_path, console, {}) == tmp_path / "keys"
    maker.join(WAIT_S)
    assert (
        isinstance(console.file, io.StringIO)
        and "waiting for the orchestrator to make the keys" in console.file.getvalue()
    )


def test_where_only_the_orchestrators_own_keys_are_there_is_no_bundle_and_no_command(tmp_path: Path) -> None:
    """As in a container with keys from outside."""
    recipe, made = two_nodes(tmp_path / "run"), Keyring.make(tmp_path / "made", "run")
    environment = {VARIABLE: str(made.folder / "orchestrator")}
    assert keys_of_run(recipe, tmp_path / "run", environment) == made.folder / "orchestrator"
    assert not (tmp_path / "run" / "nodes").exists()
    assert commands_for_other_nodes(recipe, tmp_path / "run", {}) == []
