"""TextWorld's process: ``python -m extras.worlds.engines.textworld descriptor memory_bytes``.

Games are opened by ``{"path", "seed"}``, or by ``{"make", "cache", "seed"}``: ``tw-make`` makes the game with these arguments,
once for a cache.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from extras.worlds.engines.process import LoadedGame, RefusedError, serve


def main() -> None:
    descriptor, memory_bytes = int(sys.argv[1]), int(sys.argv[2])
    import textworld

    infos = textworld.EnvInfos(
        feedback=True, won=True, lost=True, admissible_commands=True, score=True, max_score=True, objective=True
    )

    def load(settings: Mapping[str, Any]) -> LoadedGame:
        path = settings["path"] if "path" in settings else _made(settings["make"], Path(settings["cache"]))
        if not os.path.isfile(path):
            raise RefusedError(f"there is no game {path}")
        environment = textworld.start(path, infos)
        environment.seed(settings["seed"])
        return LoadedGame(environment, environment.close)

    serve(descriptor, memory_bytes, load)


def _made(arguments: list[str], cache: Path) -> str:
    """The file of a game, from the cache if present."""
    path = cache / f"{hashlib.sha256(' '.join(arguments).encode()).hexdigest()[:16]}.z8"
    if path.is_file():
        return str(path)
    cache.mkdir(mode=0o700, parents=True, exist_ok=True)
    if cache.stat().st_uid != os.getuid():
        raise PermissionError(f"{cache} belongs to another user: set TMPDIR")
    script = Path(sysconfig.get_path("scripts")) / "tw-make"
    with tempfile.TemporaryDirectory(dir=cache, prefix="making-", ignore_cleanup_errors=True) as folder:
        made = subprocess.run(
            [sys.executable, str(script), *arguments, "--output", f"{folder}/{path.name}"],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, check=False, cwd=folder,
            # Inform writes its documentation to HOME, or to the current directory.
            env={"PATH": os.defpath, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1", "HOME": folder},
        )  # fmt: skip
        if made.returncode != 0:
            last = made.stderr.decode(errors="replace").strip().splitlines()[-1:]
            raise RefusedError(f"this game cannot be made: {' '.join(last) or made.returncode}")
        for suffix in (".json", ".z8"):  # the game last: a reader that sees the game finds the other file
            os.replace((Path(folder) / path.name).with_suffix(suffix), path.with_suffix(suffix))
    return str(path)


if __name__ == "__main__":
    main()
