"""Loads versions of an adapter into a server, each under a name of its own, beside the base that the server has loaded.

A call names its adapter, and never moves to another version while the call runs. After a load the engine ends the
running calls with the tokens that they have, and goes on with the new name; SGLang's prefix cache is apart for each name.

SGLang reads an adapter again under an unloaded name. So each load has a directory of its own, removed after the server
has read the directory: a server without a version refuses calls for this version.
"""

from __future__ import annotations

import asyncio
import itertools
import shutil
from collections.abc import Mapping
from pathlib import Path

import structlog

from services.common.errors import DeadlineError, InfrastructureError
from services.common.export import ADAPTER_WEIGHTS, PEFT_CONFIG
from services.inference.engine.served.stage import FILE, Stage
from services.inference.engine.sglang.client import SglangClient

log = structlog.get_logger(__name__)

LOADED_AT_ONCE = 2  # the current version and the one before, whose last calls may still end
_numbers = itertools.count()


class AdapterTransfer:
    """``files`` are PEFT's files beside the weights; the stage has the weights."""

    way = "adapter"

    def __init__(self, stage: Stage, files: Mapping[str, bytes]) -> None:
        self._stage = stage
        self.size_bytes = stage.size_bytes
        self._config = files[PEFT_CONFIG]
        self._loaded: dict[SglangClient, list[str]] = {}

    async def load(self, client: SglangClient, version: int, *, flush: bool) -> str:
        self._loaded = {known: names for known, names in self._loaded.items() if not known.closed}
        names = self._loaded.setdefault(client, [])
        while len(names) >= LOADED_AT_ONCE:
            await self._unload(client, names.pop(0))
        name = f"version-{version}-{next(_numbers)}"  # never used twice: a load in doubt is repeated under another
        directory = self._stage.directory / name
        try:
            await asyncio.to_thread(self._write, directory)
            await client.load_adapter(name, str(directory))
        finally:
            await asyncio.to_thread(shutil.rmtree, directory, ignore_errors=True)
        names.append(name)
        return name

    def _write(self, directory: Path) -> None:
        directory.mkdir(mode=0o700)
        shutil.copyfile(self._stage.directory / FILE, directory / ADAPTER_WEIGHTS)
        (directory / PEFT_CONFIG).write_bytes(self._config)

    async def _unload(self, client: SglangClient, name: str) -> None:
        try:
            await client.unload_adapter(name)
        except (InfrastructureError, DeadlineError) as error:  # it takes memory and is never named again
            log.warning("sglang.adapter_not_unloaded", server=client.address, adapter=name, error=error.message)
