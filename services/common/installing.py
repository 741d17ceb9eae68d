"""Commands that install what is missing, as they are for this copy of Rollmill: a checkout, an installed wheel, or an image."""

from __future__ import annotations

import re
import shlex
import sys
from importlib.metadata import PackageNotFoundError, distribution, requires
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
COMPLETE = ".complete"  # the last file of an environment of servers (Makefile); one without it is not taken
IN_CHECKOUT = (ROOT / "pyproject.toml").is_file()


def install(extra: str) -> str:
    """The command that adds the packages of an extra to those of this interpreter."""
    pip = f"{shlex.quote(sys.executable)} -m pip install"
    if IN_CHECKOUT:
        return f"{pip} -c {shlex.quote(str(ROOT / 'constraints.txt'))} -e {shlex.quote(f'{ROOT}[{extra}]')}"
    return f"{pip} 'rollmill[{extra}]'" if _requirements() else f"build the image with the extra {extra} in EXTRAS"


def missing(extra: str) -> list[str]:
    """The packages of an extra that this interpreter lacks; none where the metadata of Rollmill are missing."""
    named = (re.match(rf"([\w.-]++).*extra == ['\"]{extra}['\"]", line) for line in _requirements())
    return [found[1] for found in named if found and not _is_installed(found[1])]


def make_server_environment(engine: str, *, on_cpu: bool) -> str:
    """The commands that make an environment for the servers of ``sglang`` or ``vllm``, whose pins exclude the project's."""
    if IN_CHECKOUT or on_cpu:
        return f"make {engine}{'-cpu' if on_cpu else ''}-env in {ROOT if IN_CHECKOUT else 'a checkout'}"
    package = next((line.split(";")[0] for line in _requirements() if line.startswith(f"{engine}==")), engine)
    return f"python3.12 -m venv .venv-{engine} && .venv-{engine}/bin/python -m pip install {package}"


def _is_installed(name: str) -> bool:
    try:
        return bool(distribution(name))
    except PackageNotFoundError:
        return False


def _requirements() -> list[str]:
    """Those of the distribution, extras included; none where only the code is there."""
    return (requires("rollmill") or []) if _is_installed("rollmill") else []
