"""Makes games with TextWorld's ``tw-make``: each once, kept in a cache under its settings and seed."""

from __future__ import annotations

import asyncio
import hashlib
import os
import sys
import sysconfig
import tempfile
from pathlib import Path

import structlog

from services.common.errors import InfrastructureError, InvalidRequestError
from services.common.system.child import bound_to_this_process
from services.common.system.children import process_group
from services.envgateway.calls import SharedCalls
from services.envgateway.envs.textworld.games import CookingGame, CustomGame

log = structlog.get_logger()

_AT_ONCE = 2  # a game takes some seconds of one core
_SCRIPT = "tw-make"


class GameMaker:
    def __init__(self, cache: Path | None, timeout_s: float) -> None:
        """``cache`` left out: a folder of this user's below the system's temporary one."""
        self._cache = cache or Path(tempfile.gettempdir()) / f"rollmill-textworld-{os.getuid()}"
        self._timeout_s = timeout_s
        self._turns = asyncio.Semaphore(_AT_ONCE)
        self._shared: SharedCalls[Path] = SharedCalls(max_stored=0)

    async def make(self, game: CookingGame | CustomGame, seed: int) -> Path:
        """The game's file, from the cache if present. Concurrent requests for one game share one computation.

        Raises:
            InvalidRequestError: ``tw-make`` reports that no such game exists.
            InfrastructureError: ``tw-make`` took too long, or cannot be run.
        """
        arguments = _arguments(game, seed)
        digest = hashlib.sha256(" ".join(arguments).encode()).hexdigest()[:16]
        path = self._cache / f"{game.kind}-{seed}-{digest}.z8"
        if path.is_file():
            return path
        return await self._shared.run(path.name, lambda: self._make(arguments, path))

    async def _make(self, arguments: list[str], path: Path) -> Path:
        async with self._turns:
            self._cache.mkdir(mode=0o700, parents=True, exist_ok=True)
            if self._cache.stat().st_uid != os.getuid():
                raise InfrastructureError(f"{self._cache} belongs to another user: set envgateway.textworld.cache")
            with tempfile.TemporaryDirectory(dir=self._cache, prefix="making-", ignore_cleanup_errors=True) as folder:
                await self._run([*arguments, "--output", f"{folder}/{path.name}"], folder)
                made = Path(folder) / path.name
                for suffix in (".json", ".z8"):  # the game last: a reader that sees the game finds the other file
                    os.replace(made.with_suffix(suffix), path.with_suffix(suffix))
        log.info("textworld.made", game=path.name)
        return path

    async def _run(self, arguments: list[str], folder: str) -> None:
        script = Path(sysconfig.get_path("scripts")) / _SCRIPT
        if not script.is_file():
            raise InfrastructureError(f"{script} is missing: TextWorld is not installed as a package")
        async with process_group(
            *bound_to_this_process([sys.executable, str(script), *arguments]),
            stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE,
            env={
                "PATH": os.defpath, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1",
                "HOME": folder,  # Inform writes its documentation to HOME, or to the current directory
            },
            cwd=folder,
        ) as process:  # fmt: skip
            try:
                async with asyncio.timeout(self._timeout_s):
                    _, told = await process.communicate()
            except TimeoutError:
                raise InfrastructureError(f"{_SCRIPT} took longer than {self._timeout_s:g} s") from None
        if process.returncode != 0:
            last = told.decode(errors="replace").strip().splitlines()[-1:]
            raise InvalidRequestError(f"this game cannot be made: {' '.join(last) or process.returncode}")


def _arguments(game: CookingGame | CustomGame, seed: int) -> list[str]:
    common = ["--seed", str(seed), "--silent"]
    if isinstance(game, CustomGame):
        return [
            "custom", "--world-size", str(game.world_size), "--nb-objects", str(game.nb_objects),
            "--quest-length", str(game.quest_length), *common,
        ]  # fmt: skip
    switches = [f"--{name}" for name in ("open", "cook", "cut", "drop") if getattr(game, name)]
    return [
        "tw-cooking", "--recipe", str(game.recipe), "--take", str(game.take), "--go", str(game.go),
        "--recipe-seed", str(seed), "--split", game.split, *switches, *common,
    ]  # fmt: skip
