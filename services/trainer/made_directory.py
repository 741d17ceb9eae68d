"""A directory that is made once, appears under its name only when it is complete, and says what made it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import structlog

from services.common.errors import ConfigError

log = structlog.get_logger()


def make_directory(target: Path, section: str, made_by: Mapping[str, Any], make: Callable[[Path], None]) -> bool:
    """Let ``make`` fill the directory; False when it is there already. ``section`` names the settings, ``made_by`` holds them.

    Raises:
        ConfigError: other settings made what is there.
    """
    record = f"{section}.json"
    if target.exists():
        path = target / record
        if not path.exists() or json.loads(path.read_text()) != json.loads(json.dumps(made_by)):
            raise ConfigError(f"{target} was made by other {section} settings: remove it, or start a new run")
        log.info("directory.reused", section=section, path=str(target))
        return False
    partial = target.with_name(f"{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    make(partial)
    (partial / record).write_text(json.dumps(made_by, indent=1))
    partial.rename(target)
    log.info("directory.made", section=section, path=str(target))
    return True
