"""The commands that install what is missing, for a checkout, an installed wheel and an image."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest

from services.cli.check.recipe import launch_problems
from services.common import installing
from services.common.config.loading import load_recipe

REPOSITORY = Path(__file__).resolve().parents[3]


def test_a_checkout_installs_its_own_extra_at_its_pins() -> None:
    command = shlex.split(installing.install("mcp"))
    assert command[:4] == [sys.executable, "-m", "pip", "install"]
    assert command[4:] == ["-c", str(REPOSITORY / "constraints.txt"), "-e", f"{REPOSITORY}[mcp]"]


def test_a_wheel_adds_an_extra_to_itself_and_an_image_is_built_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installing, "IN_CHECKOUT", False)
    assert installing.install("mcp").endswith("-m pip install 'rollmill[mcp]'")
    assert installing.make_server_environment("sglang", on_cpu=False).endswith("pip install sglang==0.5.23")
    assert installing.make_server_environment("vllm", on_cpu=True) == "make vllm-cpu-env in a checkout"
    monkeypatch.setattr(installing, "_is_installed", lambda name: False)
    assert installing.install("mcp") == "build the image with the extra mcp in EXTRAS"
    assert installing.missing("trainer") == []


def test_packages_that_the_services_of_a_recipe_lack_are_told_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = installing._is_installed
    recipe = load_recipe(REPOSITORY / "recipes" / "quickstart", (), {})
    assert not launch_problems(recipe)
    monkeypatch.setattr(
        installing,
        "_is_installed",
        lambda name: name not in ("torch", "math-verify", "reasoning-gym") and installed(name),
    )
    told = launch_problems(recipe)
    assert told == [f"its services need math-verify, torch, not installed here: {installing.install('all')}"]
    without_gateway = load_recipe(REPOSITORY / "recipes" / "spell_backward", ["envgateway=null"], {})
    assert "math-verify" not in launch_problems(without_gateway)[0]
