"""Writes and restores durable checkpoints: weights, optimizer state, update number, random state, training step.

    save     every rank writes its files, fsync, reads them back -> manifest, fsync -> rename -> remove the oldest
    begin    every rank copies its rows to host memory, and a thread writes them while training goes on -> finish
    restore  newest -> manifest -> all ranks verify the files against their digests -> rows into memory
                 damaged: log, rename with the reason, take the previous one

Invariant: a directory gets its name ``step_000010`` after its whole content is durable, and an older checkpoint is removed
only after that; so a process that dies at any moment leaves a complete checkpoint. Reading never executes code: files
are safetensors and JSON. Ranks agree on each fact that they could observe differently. The learning rate is a function
of the update number, so there is no further scheduler state.

Tensors of a checkpoint, of which a rank writes and reads its own rows; the number of ranks may differ between both:

    weights/NAME      every weight, tied ones once, and the buffers that a model stores
    exp_avg/NAME, exp_avg_sq/NAME, step/NAME    AdamW's state of each updated weight
    random_state/R    torch's generator on rank R

At the end of a run the last checkpoint becomes a Hugging Face export, as `rollmill export` makes it.
"""

from __future__ import annotations

import contextvars
import copy
import json
import os
import shutil
import socket
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from pathlib import Path
from types import MappingProxyType
from typing import Any

import structlog
import torch

from services.common import checkpoints as names
from services.common.checkpoints import (
    FILES,
    MANIFEST,
    MODEL_FILES,
    RANDOM_STATE,
    WEIGHTS,
    Manifest,
    Piece,
    StoredFile,
    StoredTensor,
    TensorReader,
    encode,
    write_bytes,
    write_safetensors,
)
from services.common.errors import (
    ConfigError,
    CorruptDataError,
    DeadlineError,
    InfrastructureError,
    ModelMismatchError,
    RollmillError,
)
from services.common.export import adapter_files
from services.common.system.machine import available_bytes, complete_directory, sync_directory
from services.common.telemetry.logs import LogEvent
from services.common.weights.snapshot import AdapterIdentity, check_same_adapter, named_weights
from services.trainer.model.optimizer import MOMENTS, PolicyOptimizer
from services.trainer.model.policy_model import PolicyModel
from services.trainer.ranks import HostGroup, Ranks, even_shares, local_rows, own_part, whole_tensors

log = structlog.get_logger()

ROOM = 1.25  # of the bytes of a copy; training and snapshots need memory meanwhile

# Timeout of an exchange in which a slow disk may delay one rank.
DISK_TIMEOUT_S = 1800.0


def in_background(work: Callable[[], None], name: str) -> Future[None]:
    """Start ``work`` in a thread at once; its future has its error.

    A daemon thread: a process that ends does not wait for the thread. The thread then leaves the same files as a killed
    process, and the next save sweeps these files.
    """
    future: Future[None] = Future()
    context = contextvars.copy_context()  # run and policy, for the log

    def run() -> None:
        try:
            context.run(work)
        except BaseException as error:  # noqa: BLE001 - raised again by whoever waits
            future.set_exception(error)
        else:
            future.set_result(None)

    threading.Thread(target=run, daemon=True, name=name).start()
    return future


class CheckpointFailedError(InfrastructureError):
    """The disk refused a checkpoint; earlier ones stay, and a later attempt may succeed."""


class DamagedCheckpointError(CorruptDataError):
    """A checkpoint differs from the written one; the message names the file and the difference."""


class Checkpoints:
    """The checkpoints of one policy in one directory. The constructor is a collective.

    ``model_files`` are config and tokenizer by name. Every checkpoint holds them beside the weights, so that an export
    needs no other directory.
    """

    def __init__(
        self,
        directory: Path,
        run_id: str,
        policy: str,
        keep: int,
        ranks: Ranks,
        model_files: Mapping[str, bytes] = MappingProxyType({}),
    ) -> None:
        self._directory = directory
        self._run_id, self._policy = run_id, policy
        self._ranks = ranks
        self._hosts = HostGroup(ranks, DISK_TIMEOUT_S)
        self._keep = keep
        self._model_files = model_files
        self._writing: Future[None] | None = None

    def kept(self) -> list[int]:
        """The training steps of the complete checkpoints, ascending."""
        return names.steps(self._directory)

    def path(self, training_step: int) -> Path:
        """The path of the checkpoint of a step, whether it exists or not."""
        return names.path_of(self._directory, training_step)

    def set_aside(self, after: int = 0) -> list[str]:
        """Names of the damaged checkpoints of steps after ``after`` that were set aside, each with the reason."""
        return [
            f"{path.name}: {names.reason_of(path)}"
            for step, path in names.checkpoints_in(self._directory)
            if step > after and names.is_set_aside(path)
        ]

    # -- writing -----------------------------------------------------------------------------------------------------

    def save(self, training_step: int, model: PolicyModel, optimizer: PolicyOptimizer) -> None:
        """Write a checkpoint and remove the oldest ones. A collective; returns at once when the checkpoint exists.

        Waits for one that is being written. Raises the errors of ``finish``.
        """
        self.finish()
        if not self._exists(training_step):
            self.write(training_step, contents(model, optimizer, self._ranks))

    def begin(
        self,
        training_step: int,
        model: PolicyModel,
        optimizer: PolicyOptimizer,
        on_durable: Callable[[], None] = lambda: None,
    ) -> None:
        """Copy this rank's part to host memory, and write the checkpoint while training goes on. A collective.

        Waits for one that is being written, so that there is one copy at most. The checkpoint counts when it is durable and
        has its name; then ``on_durable`` is called, in the thread. If a host lacks memory for the copies of its ranks, this works
        as ``save`` does. Raises the errors of ``finish``.
        """
        self.finish()
        if self._exists(training_step):
            on_durable()
            return
        began = time.monotonic()
        live = contents(model, optimizer, self._ranks)
        if not self._have_room(live.size_bytes):
            self.write(training_step, live)
            on_durable()
            return
        copied = contents(model, optimizer, self._ranks, copied=True)
        seconds = round(time.monotonic() - began, 3)
        log.info("checkpoint.begun", step=training_step, bytes=copied.size_bytes, pause_s=seconds)

        def write() -> None:
            self.write(training_step, copied)
            on_durable()

        self._writing = in_background(write, f"checkpoint-{training_step}")

    def write(self, training_step: int, contents: Contents) -> None:
        """Write, verify and name the checkpoint of a step, then remove the oldest ones.

        Raises:
            CheckpointFailedError: on every rank, when one could not write: no space, or no permission.
        """
        target = names.path_of(self._directory, training_step)
        partial = target.with_name(f"{target.name}{names.PARTIAL}")
        began = time.monotonic()
        try:
            self._agree("preparing a checkpoint", lambda: self._prepare(partial, contents))
            written = self._agree("writing a checkpoint", lambda: self._write_own(partial, contents))
            files = [file for text in written for file in FILES.validate_json(text)]
            self._agree(
                "completing a checkpoint", lambda: self._complete(partial, target, files, training_step, contents)
            )
        except CheckpointFailedError:
            if self._ranks.is_first:
                shutil.rmtree(partial, ignore_errors=True)
            raise
        size = sum(file.size_bytes for file in files)
        seconds = round(time.monotonic() - began, 3)
        log.info("checkpoint.saved", step=training_step, path=str(target), bytes=size, seconds=seconds)

    def _prepare(self, partial: Path, contents: Contents) -> str:
        if self._ranks.is_first:
            for left_over in names.leftovers(self._directory):  # a process died during the write
                names.sweep(left_over)
            partial.mkdir(parents=True)
            needed = contents.size_bytes_of_all_ranks
            free = shutil.disk_usage(partial).free
            if free < needed:
                raise OSError(f"no free disk: it needs about {needed} bytes, {free} are free")
        return ""

    def _write_own(self, partial: Path, contents: Contents) -> str:
        """Write and verify this rank's files; returns their description as JSON."""
        rank = self._ranks.rank
        of_run = {"format": "pt", "run_id": self._run_id, "policy": self._policy}
        files = [
            write_safetensors(partial / name, name, pieces, of_run)
            for name, pieces in (
                (f"weights_{rank:05d}.safetensors", contents.weights),
                (f"optimizer_{rank:05d}.safetensors", contents.optimizer),
            )
        ]
        if self._ranks.is_first:
            for name, data in self._model_files.items():
                path = partial / MODEL_FILES / name
                path.parent.mkdir(parents=True, exist_ok=True)
                files.append(write_bytes(path, f"{MODEL_FILES}{name}", data))
                sync_directory(path.parent)
        # Read back before an older checkpoint is removed: the disk may have lost data.
        if damage := names.find_damage(partial, files):
            raise OSError(f"the disk has not kept the written bytes: {damage}")
        return FILES.dump_json(tuple(files)).decode()

    def _complete(
        self, partial: Path, target: Path, files: list[StoredFile], training_step: int, contents: Contents
    ) -> str:
        if not self._ranks.is_first:
            return ""
        manifest = Manifest(
            run_id=self._run_id,
            policy=self._policy,
            training_step=training_step,
            num_updates=contents.num_updates,
            num_ranks=self._ranks.world_size,
            optimizer=LAYOUT,
            written_at=int(time.time()),
            tensors=contents.tensors,
            files=tuple(files),
            adapter=contents.adapter,
        )
        encoded = encode(manifest)
        write_bytes(partial / MANIFEST, MANIFEST, encoded)
        sync_directory(partial)
        try:
            is_kept = names.read_whole(partial / MANIFEST) == encoded
        except CorruptDataError:
            is_kept = False
        if not is_kept:
            raise OSError(f"the disk has not kept the written bytes: {MANIFEST} differs")
        os.rename(partial, target)
        for parent in (self._directory, *list(self._directory.parents)[:2]):  # the directories that the run created
            sync_directory(parent)
        for step in names.steps(self._directory)[: -self._keep]:
            try:
                names.remove(names.path_of(self._directory, step))
            except OSError as error:  # the new checkpoint is complete; only an old one remains
                log.warning("checkpoint.not_removed", step=step, error=str(error))
        return ""

    def _agree(
        self, what: str, work: Callable[[], str], error: type[RollmillError] = CheckpointFailedError
    ) -> list[str]:
        """Run ``work`` on every rank; raise ``error`` on all of them when one fails."""
        try:
            return self._hosts.agree(what, work, error)
        except OSError as failure:  # a single rank has no other rank to inform
            raise error(f"{self._directory}: {what}: {failure}") from failure

    @property
    def is_writing(self) -> bool:
        """Whether this rank's thread is at work."""
        return self._writing is not None and not self._writing.done()

    def finish(self) -> None:
        """Wait for the checkpoint that is being written, if there is one. A collective.

        Raises:
            CheckpointFailedError: on every rank, when one could not write: no space, or no permission.
            DeadlineError: the disk does not answer.
        """
        writing, self._writing = self._writing, None
        if writing is None:
            return
        try:
            writing.result(3 * DISK_TIMEOUT_S)  # three exchanges of a writer
        except TimeoutError:
            raise DeadlineError(
                f"writing a checkpoint to {self._directory} took longer than {3 * DISK_TIMEOUT_S:g} s: is the disk still there?",
                wait="writing a checkpoint",
            ) from None

    def _exists(self, training_step: int) -> bool:
        """The first rank's answer, on every rank."""
        return bool(self._ranks.max(self._ranks.is_first and self.path(training_step).exists())[0])

    def _have_room(self, size_bytes: int) -> bool:
        """Whether every host has memory for the copies of its ranks."""
        needed = int(size_bytes * int(os.environ.get("LOCAL_WORLD_SIZE", "1")) * ROOM)
        available = available_bytes()
        lacks = bool(self._ranks.max(needed > available)[0])
        if lacks:
            log.warning("checkpoint.not_copied", needed_bytes=needed, available_bytes=available)
        return not lacks

    # -- reading -----------------------------------------------------------------------------------------------------

    def restore(self, model: PolicyModel, optimizer: PolicyOptimizer) -> int:
        """Load the newest undamaged checkpoint; returns its training step, 0 without one. A collective.

        A damaged checkpoint is logged and set aside with the reason, and the previous one is tried. Weights stay
        unchanged when none is left.

        Raises:
            ModelMismatchError: the newest belongs to another run, policy or model; the message names the difference.
        """
        while step := self._ranks.max(max(self.kept(), default=0) if self._ranks.is_first else 0)[0]:
            try:
                self.load(step, model, optimizer)
            except DamagedCheckpointError as error:
                self._set_aside(step, error.message)
            else:
                return step
        return 0

    def load(self, training_step: int, model: PolicyModel, optimizer: PolicyOptimizer) -> None:
        """Verify a checkpoint, then restore weights, moments, update number and random state. A collective.

        Raises, on every rank alike:
            DamagedCheckpointError: the checkpoint differs from the written one. The model stays unchanged.
            ModelMismatchError: the checkpoint belongs to another run, policy or model; the message names the difference.
        """
        path = self.path(training_step)
        began = time.monotonic()

        def manifest_damage() -> str:
            try:
                names.read_manifest(path)
            except CorruptDataError as error:
                return error.message
            return ""

        self._refuse_damaged(path, self._agree("reading a checkpoint's manifest", manifest_damage, ConfigError))
        manifest = names.read_manifest(path)
        self._agree(
            "checking whose checkpoint it is", lambda: self._check(path, manifest, model, optimizer), ModelMismatchError
        )
        own = even_shares(manifest.files, attrgetter("size_bytes"), self._ranks.world_size)[self._ranks.rank]
        self._refuse_damaged(
            path,
            self._agree("verifying a checkpoint", lambda: names.find_damage(path, own), InfrastructureError),
        )
        verified = time.monotonic()
        with TensorReader(path, manifest) as reader:
            restore(model, optimizer, reader)
            restore_random_state(reader, self._ranks, manifest.tensors)
        optimizer.adamw.zero_grad(set_to_none=True)
        optimizer.num_updates = manifest.num_updates
        log.info(
            LogEvent.CHECKPOINT_LOADED,
            step=training_step,
            path=str(path),
            bytes=manifest.size_bytes,
            verify_s=round(verified - began, 3),
            read_s=round(time.monotonic() - verified, 3),
        )

    def _refuse_damaged(self, path: Path, results: list[str]) -> None:
        damage = "; ".join(dict.fromkeys(text for text in results if text))
        if damage:
            raise DamagedCheckpointError(f"{path} is damaged: {damage}")

    def _set_aside(self, training_step: int, reason: str) -> None:
        path = self.path(training_step)
        moved = self._agree(
            "setting a damaged checkpoint aside",
            lambda: names.set_aside(path, reason).name if self._ranks.is_first else "",
            ConfigError,
        )[0]
        log.error(LogEvent.CHECKPOINT_DAMAGED, step=training_step, reason=reason, set_aside_as=moved)

    def _check(self, path: Path, manifest: Manifest, model: PolicyModel, optimizer: PolicyOptimizer) -> str:
        for key, mine in (("run_id", self._run_id), ("policy", self._policy)):
            if getattr(manifest, key) != mine:
                raise ModelMismatchError(
                    f"{path} belongs to {key} {getattr(manifest, key)!r}, not to {mine!r}: remove it, or use another "
                    "run directory"
                )
        check_same_adapter(model.adapter, manifest.adapter, f"{path} (remove it, or use another run directory)")
        stored = manifest.tensors
        own = describe({**weights_of(model), **moments_of(model, optimizer)})
        generator = next(iter(describe(random_state(self._ranks)).values()))
        own |= {
            name: generator for name in stored if name.startswith(RANDOM_STATE)
        }  # the writer may have had any number of ranks
        wrong = [name for name in sorted({*stored, *own}) if stored.get(name) != own.get(name)]
        if wrong:
            first = next((name for name in wrong if name.startswith(WEIGHTS)), wrong[0])
            raise ModelMismatchError(
                f"{path} is a checkpoint of another model: {first.removeprefix(WEIGHTS)} is {stored.get(first, 'missing')} there and "
                f"{own.get(first, 'missing')} here ({len(wrong)} tensors differ): remove it, or use another run directory"
            )
        return ""


# -- the state of a model and its optimizer, in names and parts --------------------------------------------------------------

LAYOUT = "adamw"
_STATES_PER_WEIGHT = 3  # the weight and AdamW's two moments


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """This rank's parts of a checkpoint, and facts about the whole."""

    weights: list[Piece]
    optimizer: list[Piece]  # moments, and the random state
    tensors: Mapping[str, StoredTensor]  # of all ranks
    size_bytes_of_all_ranks: int  # about
    num_updates: int
    adapter: AdapterIdentity | None

    @property
    def size_bytes(self) -> int:
        """Of this rank's parts."""
        return sum(piece.size_bytes for piece in (*self.weights, *self.optimizer))


def contents(model: PolicyModel, optimizer: PolicyOptimizer, ranks: Ranks, *, copied: bool = False) -> Contents:
    """The state of now. With ``copied`` in host memory of its own, else in the memory of model and optimizer."""
    weights, moments, random = weights_of(model), moments_of(model, optimizer), random_state(ranks)
    generator = next(iter(describe(random).values()))
    num_bytes = sum(weight.numel() * weight.element_size() for weight in weights.values())
    return Contents(
        weights=pieces(weights, ranks, copied=copied),
        optimizer=[*pieces(moments, ranks, copied=copied), *pieces(random, Ranks.single())],
        tensors={
            **describe({**weights, **moments}),
            **{f"{RANDOM_STATE}{rank}": generator for rank in range(ranks.world_size)},
        },
        size_bytes_of_all_ranks=_STATES_PER_WEIGHT * num_bytes,
        num_updates=optimizer.num_updates,
        adapter=model.adapter,
    )


def weights_of(model: PolicyModel) -> dict[str, torch.Tensor]:
    """Weights and stored buffers by their name in the checkpoint; the tensors share memory with the model.

    Of a model with an adapter: what is trained. The base is known by its digest.
    """
    found: dict[int, tuple[str, torch.Tensor]] = {}
    # keep_vars: without it every call creates new tensors, and tied weights are not recognised.
    for name, tensor in model.state_dict(keep_vars=True).items():
        if model.adapter is None or tensor.requires_grad:
            found.setdefault(id(tensor), (f"{WEIGHTS}{name}", tensor.detach()))
    return dict(found.values())


def moments_of(model: PolicyModel, optimizer: PolicyOptimizer) -> dict[str, torch.Tensor]:
    """AdamW's state by its name in the checkpoint; the tensors share memory with the optimizer."""
    trained = {id(parameter) for parameter in optimizer.parameters}
    return {
        f"{kind}/{name}": optimizer.adamw.state[parameter][kind].detach()
        for name, parameter in model.named_parameters()
        for kind in (*MOMENTS, "step")
        if id(parameter) in trained
    }


def describe(tensors: Mapping[str, torch.Tensor]) -> dict[str, StoredTensor]:
    """Types and shapes of whole tensors, the same on every rank."""
    return {name: StoredTensor(dtype=_dtype(t), shape=tuple(t.shape)) for name, t in tensors.items()}


def pieces(tensors: Mapping[str, torch.Tensor], ranks: Ranks, *, copied: bool = False) -> list[Piece]:
    """This rank's parts. The first rank owns the tensors that all ranks hold whole."""
    found = []
    for name, tensor in tensors.items():
        flat, first = own_part(tensor, ranks)
        if flat.numel():
            shape = tuple(local_rows(tensor)[0].shape)
            if copied:
                flat = flat.to("cpu", copy=True)
            found.append(
                Piece(
                    tensor=name, dtype=_dtype(flat), shape=shape, first=first, count=flat.numel(),
                    data=partial(_on_host, flat),
                )
            )  # fmt: skip
    return found


def random_state(ranks: Ranks) -> dict[str, torch.Tensor]:
    """The state of this rank's generator."""
    return {f"{RANDOM_STATE}{ranks.rank}": torch.get_rng_state()}


@torch.no_grad()
def restore(model: PolicyModel, optimizer: PolicyOptimizer, reader: TensorReader) -> None:
    """Fill this rank's rows of weights and moments in place. Moments on the host stay on the host."""
    for name, tensor in {**weights_of(model), **moments_of(model, optimizer)}.items():
        rows, first_row = local_rows(tensor)
        if rows.numel():
            _fill(rows, reader, name, first_row * (rows.numel() // len(rows)) if rows.ndim else 0)


def restore_random_state(reader: TensorReader, ranks: Ranks, stored: Mapping[str, StoredTensor]) -> None:
    """Restore this rank's generator; a rank that the writer did not have keeps its own state."""
    name = f"{RANDOM_STATE}{ranks.rank}"
    if name in stored:
        state = torch.empty(stored[name].num_elements, dtype=torch.uint8)
        _fill(state, reader, name, 0)
        torch.set_rng_state(state)


def _fill(rows: torch.Tensor, reader: TensorReader, name: str, first: int) -> None:
    if rows.device.type == "cpu" and rows.is_contiguous():
        reader.read(name, first, _bytes(rows))
        return
    staged = torch.empty(rows.shape, dtype=rows.dtype)
    reader.read(name, first, _bytes(staged))
    rows.copy_(staged)


def _on_host(flat: torch.Tensor) -> Iterator[memoryview]:
    yield _bytes(flat.to("cpu").contiguous())


def _bytes(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU."""
    return tensor.view(-1).view(torch.uint8).numpy().data


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


# -- one directory for all ranks ---------------------------------------------------------------------------------------------

APPEAR_S = 5.0  # network file systems show a new file late
POLL_S = 0.1
_MARK = ".seen-by-all-"


def require_shared(directory: Path, ranks: Ranks, appear_s: float = APPEAR_S) -> None:
    """Raise ``ConfigError`` on every rank when a rank does not see the first rank's file. A collective."""
    if ranks.world_size == 1:
        return
    hosts = HostGroup(ranks)
    mark = directory / f"{_MARK}{uuid.uuid4().hex}"

    def write() -> str:
        if ranks.is_first:
            directory.mkdir(parents=True, exist_ok=True)
            mark.touch()
        return mark.name

    name = hosts.agree("preparing the directory of checkpoints", write, ConfigError)[0]

    def look() -> str:
        deadline = time.monotonic() + appear_s
        while not (directory / name).exists():
            if time.monotonic() > deadline:
                raise ConfigError(
                    f"on {socket.gethostname()}, {directory} is not the directory that the first rank writes checkpoints to: "
                    "a trainer on several nodes needs one that all of them see; name it with --run-dir (RUN_DIR)"
                )
            time.sleep(POLL_S)
        return ""

    try:
        hosts.agree("looking for the directory of checkpoints", look, ConfigError)
    finally:
        if ranks.is_first:
            mark.unlink(missing_ok=True)


# -- exports of models whose weights have other names in files --------------------------------------------------------------


def has_other_names_in_files(causal_lm: Any) -> bool:
    """Whether transformers stores weights under other names than the model uses, such as those of experts."""
    from transformers.core_model_loading import revert_weight_conversion

    weights = {name: torch.empty(w.shape, device="meta") for name, w in named_weights(causal_lm).items()}
    return set(revert_weight_conversion(causal_lm, weights)) != set(weights)


def export_under_names_of_files(
    model: PolicyModel, tokenizer: Any, directory: Path, ranks: Ranks, dtype: torch.dtype
) -> None:
    """Gather the model and write it as transformers does; the directory appears when complete. A collective.

    Raises:
        OSError, SafetensorError: on the first rank; the disk refuses it.
    """
    from transformers.utils import logging

    weights = {
        name: weight
        for name, weight in whole_tensors(named_weights(model.causal_lm), ranks, dtype)
        if weight is not None
    }
    if not ranks.is_first:
        return
    logging.disable_progress_bar()
    with complete_directory(directory) as partial:
        model.causal_lm.save_pretrained(partial, state_dict=weights)
        config = json.loads((partial / "config.json").read_text())
        config["dtype"] = str(dtype).removeprefix("torch.")  # else that of the master weights
        (partial / "config.json").write_text(json.dumps(config, indent=2))
        tokenizer.save_pretrained(partial)


# -- files for exports ----------------------------------------------------------------------------------------------------


def checkpoint_files(model: PolicyModel, tokenizer: Any, publish_dtype: str) -> dict[str, bytes]:
    """The files that a checkpoint needs for exports: config and tokenizer, and those about an adapter and its base."""
    if model.adapter is None or model.base is None:
        return model_files(model.causal_lm, tokenizer, publish_dtype)
    base = model.base
    files = model_files(model.causal_lm, tokenizer, base.dtype)
    return files | adapter_files(model.adapter, base.path, base.dtype, base.tensors)


def model_files(causal_lm: Any, tokenizer: Any, dtype: str) -> dict[str, bytes]:
    """Config, generation config and tokenizer by file name; the config states ``dtype``."""
    config = copy.deepcopy(causal_lm.config)
    config.dtype = dtype
    config.architectures = [type(causal_lm).__name__.removeprefix("FSDP")]  # sharding renames classes
    with tempfile.TemporaryDirectory(prefix="rollmill-model-") as made:
        directory = Path(made)
        config.save_pretrained(directory)
        if causal_lm.can_generate():
            causal_lm.generation_config.save_pretrained(directory)
        tokenizer.save_pretrained(directory)
        files = sorted(path for path in directory.rglob("*") if path.is_file())
        return {path.relative_to(directory).as_posix(): path.read_bytes() for path in files}
