"""Names the state of a model and its optimizer in a checkpoint; extracts and fills this rank's parts.

    weights/NAME      every weight, tied ones once, and the buffers that a model stores
    exp_avg/NAME, exp_avg_sq/NAME, step/NAME    AdamW's state of each updated weight
    random_state/R    torch's generator on rank R

A rank writes the rows that this rank holds, and reads its rows from the files of all writers. So the number of ranks may
differ between writing and reading. Independent of directories and files.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch

from services.common.checkpoints.files import Piece, TensorReader
from services.common.checkpoints.manifest import RANDOM_STATE, WEIGHTS, StoredTensor
from services.common.weights.snapshot import AdapterIdentity
from services.trainer.model.moments_on_host import MOMENTS
from services.trainer.model.optimizer import PolicyOptimizer
from services.trainer.model.policy_model import PolicyModel
from services.trainer.ranks.sharding import Ranks, local_rows, own_part

LAYOUT = "adamw"
_STATES_PER_WEIGHT = 3  # the weight and AdamW's two moments
_STEP = "step"
_OF_ADAMW = (*MOMENTS, _STEP)


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
        optimizer=[*pieces(moments, ranks, copied=copied), *own_pieces(random)],
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
    """AdamW's state by its name in the checkpoint, of the updated weights; the tensors share memory with the optimizer."""
    return {
        f"{kind}/{name}": optimizer.adamw.state[parameter][kind].detach()
        for name, parameter in _trained(model, optimizer)
        for kind in _OF_ADAMW
        if optimizer.adamw.state.get(parameter)
    }


def describe(tensors: Mapping[str, torch.Tensor]) -> dict[str, StoredTensor]:
    """Types and shapes of whole tensors, the same on every rank."""
    return {name: StoredTensor(dtype=_dtype(t), shape=tuple(t.shape)) for name, t in tensors.items()}


def expected(
    model: PolicyModel, optimizer: PolicyOptimizer, stored: Mapping[str, StoredTensor]
) -> dict[str, StoredTensor]:
    """The tensors that a checkpoint with the names of ``stored`` must hold for this model, without random states."""
    tensors = describe(weights_of(model))
    for name, parameter in _trained(model, optimizer):
        if any(f"{kind}/{name}" in stored for kind in _OF_ADAMW):  # none: the weight was never updated
            whole = StoredTensor(dtype=_dtype(parameter), shape=tuple(parameter.shape))
            tensors |= {f"{kind}/{name}": whole for kind in MOMENTS}
            tensors[f"{_STEP}/{name}"] = StoredTensor(dtype="float32", shape=())
    return tensors


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


def own_pieces(tensors: Mapping[str, torch.Tensor]) -> list[Piece]:
    """Whole tensors that no other rank has."""
    return pieces(tensors, Ranks.single())


@torch.no_grad()
def restore(
    model: PolicyModel, optimizer: PolicyOptimizer, reader: TensorReader, stored: Mapping[str, StoredTensor]
) -> None:
    """Fill this rank's rows of weights and moments in place. Moments on the host stay on the host."""
    tensors = weights_of(model)
    state = optimizer.adamw.state
    for name, parameter in _trained(model, optimizer):
        if f"{_STEP}/{name}" in stored:
            if not state[parameter]:
                # The same tensors as AdamW creates before its first update.
                state[parameter] = {_STEP: torch.zeros((), dtype=torch.float32, device=parameter.device)}
                state[parameter] |= {kind: torch.zeros_like(parameter.detach()) for kind in MOMENTS}
            tensors |= {f"{kind}/{name}": state[parameter][kind] for kind in _OF_ADAMW}
        else:
            for kind in state.get(parameter, ()):  # as before the first update
                local_rows(state[parameter][kind])[0].zero_()
    for name, tensor in tensors.items():
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


def _trained(model: PolicyModel, optimizer: PolicyOptimizer) -> Iterator[tuple[str, torch.nn.Parameter]]:
    trained = {id(parameter) for parameter in optimizer.parameters}
    return ((name, p) for name, p in model.named_parameters() if id(p) in trained)


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
