"""Keys of a run over two nodes: made once, one role for each process, and a bundle that gives the other node no more
than this node needs."""

from __future__ import annotations

import io
import os
import stat
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from rich.console import Console

from services.cli.keys import Keyring, keys_of, keys_of_process, renew_in_time, with_keys, write_bundles
from services.cli.plan import commands_for_other_nodes, plan
from services.common.config.loading import load_recipe, load_resolved, save_resolved
from services.common.config.recipe import Recipe
from services.common.errors import ConfigError
from services.common.security import identity
from services.common.security.keys import Role
from tests.waiting import WAIT_S

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
