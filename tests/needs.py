"""The needs of tests beyond `make install`: each has one probe, which runs once, and a command that meets it.

A test says ``@pytest.mark.needs("redis-server")``; a fixture calls ``needs.check("data root")``. Where the need is not
met the test is skipped, and the line at the end of the run counts it. ROLLMILL_REQUIRE turns skips into failures:
names separated by commas, ``ci`` for the needs that a CI machine can meet, ``all`` for every need.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from ctypes.util import find_library
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import pytest

from extras.hub.verifiers.tasks import interpreter
from services.cli.plan import address_of_node_0
from services.common.config.envgateway import SandboxConfig
from services.common.config.processes import Tracker, missing_packages
from services.common.errors import ConfigError, SandboxRefusedError
from services.envgateway.sandbox.bare import native
from services.envgateway.sandbox.bare.confinement import landlock_version
from services.envgateway.sandbox.launch import SupervisorLauncher
from tests import two_machines

REQUIRE = "ROLLMILL_REQUIRE"
PROBE_S = 120.0


@dataclass(frozen=True)
class Need:
    """``missing`` gives the reason why the need is not met, or an empty text. ``add`` is the command or the change that
    meets the need.

    ``on_ci``: Debian as root with namespaces and without a GPU can meet the need.
    """

    name: str
    missing: Callable[[], str | None]
    add: str
    on_ci: bool = True


class Unmet(pytest.skip.Exception):  # type: ignore[name-defined]
    """Skips a test for a need of this table."""

    def __init__(self, need: Need, why: str) -> None:
        super().__init__(f"needs {need.name}: {why} ({need.add})")
        self.need = need


def installed(program: str) -> str | None:
    """The path of a program: the system's, else the one that a package put beside this Python."""
    return shutil.which(program) or shutil.which(program, path=str(Path(sys.executable).parent))


def _program(name: str) -> Callable[[], str | None]:
    return lambda: None if installed(name) else f"there is no {name}"


def _package(*names: str) -> Callable[[], str | None]:
    def missing() -> str | None:
        absent = [name for name in names if importlib.util.find_spec(name) is None]
        return f"{' and '.join(absent)} is not installed" if absent else None

    return missing


def _variable(name: str, what: str) -> Callable[[], str | None]:
    return lambda: None if Path(os.environ.get(name) or "/none").exists() else f"{name} names no {what}"


def _made_rows(folder: str) -> Callable[[], str | None]:
    def missing() -> str | None:
        there = Path(os.environ.get("ROLLMILL_DATA_ROOT") or "/none") / folder
        return None if there.is_dir() else f"ROLLMILL_DATA_ROOT names no folder with {folder}"

    return missing


def _fails(command: Sequence[str]) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PROBE_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{command[0]} does not run: {error}"
    return (done.stderr.strip() or f"{command[0]} exits with {done.returncode}") if done.returncode else None


def _no_tmpfs() -> str | None:
    with tempfile.TemporaryDirectory() as place:
        refused = _fails(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", place])
        return refused or _fails(["umount", "-l", place])


def _no_sandbox(*tiers: str) -> Callable[[], str | None]:
    def missing() -> str | None:
        launcher = SupervisorLauncher(SandboxConfig(num_slots=1, prewarm_scientific=False), tiers)
        try:
            launcher.launch().stop()
        except SandboxRefusedError as refusal:
            return refusal.message
        finally:
            launcher.close()
        return None

    return missing


def _no_ipv6() -> str | None:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return None
    except OSError as error:
        return str(error)


def _only_loopback() -> str | None:
    try:
        address_of_node_0({})
    except ConfigError as error:
        return error.message
    return None


def _no_cuda() -> str | None:
    import torch  # only tests of the GPU ask

    return None if torch.cuda.is_available() else "torch sees no CUDA device"


def _no_verifiers() -> str | None:
    try:
        python = interpreter()
    except ConfigError as error:
        return error.message
    return _fails([python, "-c", "import importlib.util, sys; sys.exit(not importlib.util.find_spec('verifiers'))"])


UV = (sys.executable, "-m", "uv")


def _no_package_index() -> str | None:
    with tempfile.NamedTemporaryFile("w", suffix=".in") as wanted:
        wanted.write("xxhash")
        wanted.flush()
        return _fails([*UV, "pip", "compile", "--quiet", "--no-config", "--refresh", wanted.name])


def _as_root(wanted: bool) -> Callable[[], str | None]:
    return lambda: None if (os.getuid() == 0) is wanted else f"the user id is {os.getuid()}"


_ENVS, _DEV, _INTEGRATIONS = "make install-envs", "make install", "make install-integrations"
_PRIVILEGED = "run as root with namespaces, in a container with --privileged"

NEEDS = {
    need.name: need
    for need in (
        Need("alfworld", _package("alfworld", "textworld", "fast_downward"), _ENVS),
        Need("textworld", _package("textworld"), _ENVS),
        Need("spacy", _package("spacy"), _ENVS),
        Need("wandb", _package("wandb"), _INTEGRATIONS),
        Need("trackio", _package("trackio"), _INTEGRATIONS),
        Need("opentelemetry", lambda: "; ".join(missing_packages([Tracker.OTLP])) or None, _INTEGRATIONS),
        Need("mcp", _package("mcp"), _INTEGRATIONS),
        Need("reasoning-gym", _package("reasoning_gym"), _INTEGRATIONS),
        Need("gymnasium", _package("gymnasium"), _INTEGRATIONS),
        Need("anthropic", _package("anthropic"), _INTEGRATIONS),
        Need("openenv", _package("openenv"), _INTEGRATIONS),
        Need("verifiers", _no_verifiers, "make install-verifiers"),
        Need("varlen attention", _package("torch.nn.attention.varlen"), "a newer torch", on_ci=False),
        Need("peft", _package("peft"), _INTEGRATIONS),
        Need("redis-server", _program("redis-server"), f"{_ENVS}, or apt-get install redis-server"),
        Need("chromium", _program("chromium"), "apt-get install chromium"),
        Need("shellcheck", _program("shellcheck"), _DEV),
        Need("hadolint", _program("hadolint"), _DEV),
        Need("C++ compiler", lambda: None if os.access(native.COMPILER, os.X_OK) else f"there is no {native.COMPILER}",
             "apt-get install g++"),
        Need("two machines", two_machines.why_not, f"apt-get install iproute2, and {_PRIVILEGED}"),
        Need("tmpfs", _no_tmpfs, _PRIVILEGED),
        Need("Linux", lambda: None if sys.platform == "linux" else f"this is {sys.platform}", "run on Linux"),
        Need("root", _as_root(True), "run as root"),
        Need("a user other than root", _as_root(False), "run as another user", on_ci=False),
        Need("sandbox tier 2", _no_sandbox("2"), _PRIVILEGED),
        Need("sandbox tier 1", _no_sandbox("1"), "run as root"),
        Need("sandbox tier U", _no_sandbox("U"), "run as a user other than root, with user namespaces and Landlock",
             on_ci=False),
        Need("sandbox tier 0", _no_sandbox("0"), "envgateway.sandbox.allow_tier_0", on_ci=False),
        Need("isolating sandbox", _no_sandbox("2", "1", "U"), _PRIVILEGED),
        Need("libseccomp", lambda: None if find_library("seccomp") else "there is no libseccomp", "apt-get install libseccomp2"),
        Need("Landlock", lambda: None if landlock_version() else "this kernel has none", "Linux 5.13 or newer",
             on_ci=False),
        Need("IPv6 loopback", _no_ipv6, "sysctl net.ipv6.conf.lo.disable_ipv6=0", on_ci=False),
        Need("an address beside loopback", _only_loopback, "ip link add dummy0 type dummy, with an address and a route"),
        Need("kubernetes-validate", _package("kubernetes_validate"), _INTEGRATIONS),
        Need("package index", _no_package_index, "a way from uv to a package index (UV_DEFAULT_INDEX names another)"),
        Need("skypilot", _variable("ROLLMILL_SKYPILOT_PYTHON", "interpreter that has SkyPilot"), "make test-skypilot",
             on_ci=False),
        Need("CUDA", _no_cuda, "a machine with a GPU", on_ci=False),
        Need("SGLang", _variable("ROLLMILL_SGLANG_PYTHON", "interpreter that has SGLang"), "make test-sglang",
             on_ci=False),
        Need("vLLM", _variable("ROLLMILL_VLLM_PYTHON", "interpreter that has vLLM"), "make test-vllm", on_ci=False),
        Need("data root", _variable("ROLLMILL_DATA_ROOT", "folder of data sets"), "set ROLLMILL_DATA_ROOT",
             on_ci=False),
        Need("made ALFWorld games", _made_rows("alfworld_made"), "set ROLLMILL_DATA_ROOT", on_ci=False),
        Need("made WebShop catalogue", _made_rows("webshop_made"), "set ROLLMILL_DATA_ROOT", on_ci=False),
        Need("oracle vectors", _made_rows("oracle_vectors"), "set ROLLMILL_DATA_ROOT", on_ci=False),
        Need("settings of the references", _made_rows("reference_recipes"), "set ROLLMILL_DATA_ROOT", on_ci=False),
        Need("Compose schema", _variable("COMPOSE_SPEC_SCHEMA", "compose-spec.json"),
             "set COMPOSE_SPEC_SCHEMA to the Compose Specification's schema/compose-spec.json", on_ci=False),
    )
}  # fmt: skip


def check(name: str) -> None:
    """Skip the running test if ``name`` is not met; fail the test if ROLLMILL_REQUIRE has the name."""
    if reason := _reason(name):
        unmet(name, reason)


def unmet(name: str, why: str) -> NoReturn:
    """For facts that only the test itself finds out, such as the tier of a sandbox."""
    need = NEEDS[name]
    if name in required(os.environ.get(REQUIRE, "")):
        pytest.fail(f"{REQUIRE} has {name}, but {why} ({need.add})", pytrace=False)
    raise Unmet(need, why)


def required(words: str) -> frozenset[str]:
    """The names in ROLLMILL_REQUIRE.

    Raises:
        UsageError: a name is not in the table.
    """
    names: set[str] = set()
    for word in filter(None, (part.strip() for part in words.split(","))):
        if word in ("all", "ci"):
            names |= {need.name for need in NEEDS.values() if need.on_ci or word == "all"}
        else:
            names.add(known(word, REQUIRE))
    return frozenset(names)


def known(name: str, where: str) -> str:
    """``name``, which must be in the table."""
    if name not in NEEDS:
        raise pytest.UsageError(f"{where}: there is no need {name!r}; tests/needs.py has {', '.join(sorted(NEEDS))}")
    return name


@functools.cache
def _reason(name: str) -> str | None:
    return NEEDS[name].missing()
