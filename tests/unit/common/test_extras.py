"""Extras are found by their packages, and the core starts without them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import extras
from services.common.extras import Kind, load_extra, provided

ROOT = Path(extras.__file__).parent
KINDS: tuple[Kind, ...] = ("environments", "engines", "trackers", "metrics", "commands")


@pytest.mark.parametrize("kind", KINDS)
def test_every_provided_object_loads(kind: Kind) -> None:
    for name in provided(kind):
        assert load_extra(kind, name) is not None


def test_a_folder_of_the_user_that_is_called_extras_hides_none(tmp_path: Path) -> None:
    (tmp_path / "extras").mkdir()
    (tmp_path / "extras" / "__init__.py").write_text("raise SystemExit('the folder of the user was imported')\n")
    code = "from services.common.extras import load_extra; print(load_extra('commands', 'page').__name__)"
    paths = f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(ROOT.parent)!r}]; "
    done = subprocess.run(
        [sys.executable, "-c", paths + code], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0 and done.stdout.strip() == "page", done.stderr


def test_a_section_of_a_missing_extra_is_told_and_the_rest_loads() -> None:
    code = (
        "import services.common.extras as found; found.provided = lambda kind: {}\n"
        "from services.common.config.loading import load_recipe\n"
        "assert load_recipe(Path('quickstart'), (), {}).envgateway.extra('alfworld') is None\n"
        "load_recipe(Path('quickstart'), ['envgateway.harbor.skip_run=true'], {})"
    )
    done = subprocess.run(
        [sys.executable, "-c", f"from pathlib import Path\n{code}"],
        cwd=ROOT.parent,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (
        "envgateway.harbor: unknown key; no folder of extras/ provides 'harbor' of settings here: install"
        in done.stderr
    )
