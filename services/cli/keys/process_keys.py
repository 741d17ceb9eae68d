"""Keys of a run that is launched here: which ones, and which part of them each process gets."""

from __future__ import annotations

import dataclasses
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from services.cli.plan.specs import ProcessSpec
from services.common.config.recipe import Recipe
from services.common.security.bundle import CA, VARIABLE, is_there
from services.common.security.identity import Identity, configure
from services.common.security.roles import Role

KEYS = "keys"  # in the run directory
RENEWED_WITHIN_S = 14 * 86400.0

_ROLES = {
    "orchestrator": Role.ORCHESTRATOR,
    "envgateway": Role.ENVGATEWAY,
    "inference": Role.INFERENCE,
    "trainer": Role.TRAINER,
}


def keys_there(recipe: Recipe, run_dir: Path, environment: Mapping[str, str] = os.environ) -> Path | None:
    """The directory of the run's keys: its own, else those that MILLRACE_KEYS names; None where there are none, or TLS is off."""
    if recipe.security.tls == "off":
        return None
    folder = run_dir / KEYS
    if is_there(folder / CA):
        return folder
    given = environment.get(VARIABLE)
    return Path(given).resolve() if given else None


def keys_of(recipe: Recipe, run_dir: Path, environment: Mapping[str, str] = os.environ) -> Path | None:
    """The keys that exist, else new keys of the run; None for a run without keys. Only for commands that start
    processes: a command that calls a running run must not make new keys."""
    found = keys_there(recipe, run_dir, environment)
    if found is not None or not recipe.needs_keys:
        return found
    _make_once(recipe, run_dir / KEYS)
    return run_dir / KEYS


def _make_once(recipe: Recipe, folder: Path) -> None:
    """Whole or not at all: processes of a split launch may come at once, and the keys of the first one count."""
    from services.cli.keys.keyring import Keyring  # and cryptography: not for runs without keys

    hosts = [socket.gethostname(), *recipe.hosts.values()]
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))  # mode 700
    try:
        Keyring.make(
            partial,
            str(recipe.run.id),
            hosts=[host for host in dict.fromkeys(hosts) if host not in ("0.0.0.0", "::", "")],
            client_certificates=recipe.security.client_certificates,
        )
        partial.rename(folder)
    except OSError:
        if not (folder / CA).exists():
            raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)  # nothing is there when it was renamed


def renew_in_time(keys: Path | None) -> bool:
    """New certificates and tokens for a run that goes on, when its own would not last ``RENEWED_WITHIN_S`` any more;
    whether there are some now.

    Keys that were copied here can only be renewed where they were made.
    """
    if keys is None:
        return False
    from services.cli.keys.keyring import CA_KEY, Keyring

    if not is_there(keys / CA_KEY):
        return False
    ring = Keyring(keys)
    ends_at = min(min(each.certificate_ends_at, each.token_ends_at) for each in ring.entries())
    if ends_at > time.time() + RENEWED_WITHIN_S:
        return False
    ring.renew()
    return True


def with_keys(spec: ProcessSpec, keys: Path | None) -> ProcessSpec:
    """The process with the keys of its role and no others."""
    kind = spec.name.partition("-")[0]
    variables = {VARIABLE: ""}
    if keys is not None and kind in _ROLES:
        own = keys / _ROLES[kind].value
        # grpc logs every unfinished handshake; an unauthenticated client could fill the disk with that.
        quiet = os.environ.get("GRPC_VERBOSITY", "ERROR")
        variables = {VARIABLE: str(own if is_there(own) else keys), "GRPC_VERBOSITY": quiet}
    return dataclasses.replace(spec, env={**spec.env, **variables})


def role_of(process: str) -> Role:
    """The role of a process by its name in the plan."""
    return _ROLES[process.partition("-")[0]]


def act_as(keys: Path | None, process: str) -> Identity | None:
    """Gives this command the role of one of the run's processes, which it is about to start."""
    return configure(role_of(process), environment={VARIABLE: str(keys or "")})


def operate(keys: Path | None) -> Identity | None:
    """This command acts as an operator of the run, or as a viewer where only such keys are there."""
    return configure(Role.OPERATOR, Role.VIEWER, environment={VARIABLE: str(keys or "")})


def check_dates(identity: Identity | None) -> None:
    """Raise ``UnauthenticatedError``, with the remedy, for keys that are expired or not valid yet by the local clock."""
    if identity is None:
        return
    from services.common.security.certificates import holder_of
    from services.common.security.times import check_times

    holder = holder_of(identity.bundle.certificate)
    what = f"the certificate in {identity.folder}"
    check_times(what, holder.role, holder.begins_at, holder.ends_at, identity.clock(), leeway_s=0.0)
