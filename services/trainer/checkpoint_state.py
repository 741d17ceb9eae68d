"""What of a model and its optimizer is in a checkpoint, under which names; and this rank's parts of it, out and in.

    weights/NAME      every weight, tied ones once, and the buffers that a model stores
    exp_avg/NAME, exp_avg_sq/NAME, step/NAME    AdamW's state of a weight, where it has been updated
    random_state/R    torch's generator on rank R

A rank writes the rows that it holds, and reads the rows that it will hold, whoever wrote them: so any number of ranks
reads what any other has written. Knows nothing about directories and files.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

import torch

from services.common.checkpoints.files import Piece, TensorReader
from services.common.checkpoints.manifest import RANDOM_STATE, WEIGHTS, StoredTensor
from services.trainer.model import PolicyModel
from services.trainer.moments_on_host import MOMENTS
from services.trainer.optimizer import PolicyOptimizer
from services.trainer.sharding import Ranks, local_rows, own_part

LAYOUT = "adamw"
_STEP = "step"
_OF_ADAMW = (*MOMENTS, _STEP)


def weights_of(model: PolicyModel) -> dict[str, torch.Tensor]:
    """By name in the checkpoint; sharing their memory."""
    found: dict[int, tuple[str, torch.Tensor]] = {}
    # keep_vars: else every call makes other tensors, and tied weights could not be told.
    for name, tensor in model.state_dict(keep_vars=True).items():
        found.setdefault(id(tensor), (f"{WEIGHTS}{name}", tensor.detach()))
    return dict(found.values())


def moments_of(model: PolicyModel, optimizer: PolicyOptimizer) -> dict[str, torch.Tensor]:
    """AdamW's state by name in the checkpoint, of the weights that have some; sharing its memory."""
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
    """What a checkpoint with the names of ``stored`` has to hold for this model, but for random states."""
    tensors = describe(weights_of(model))
    for name, parameter in _trained(model, optimizer):
        if any(f"{kind}/{name}" in stored for kind in _OF_ADAMW):  # none: it was never updated
            whole = StoredTensor(dtype=_dtype(parameter), shape=tuple(parameter.shape))
            tensors |= {f"{kind}/{name}": whole for kind in MOMENTS}
            tensors[f"{_STEP}/{name}"] = StoredTensor(dtype="float32", shape=())
    return tensors


def pieces(tensors: Mapping[str, torch.Tensor], ranks: Ranks) -> list[Piece]:
    """This rank's parts; what all ranks hold whole is the first rank's."""
    found = []
    for name, tensor in tensors.items():
        flat, first = own_part(tensor, ranks)
        if flat.numel():
            shape = tuple(local_rows(tensor)[0].shape)
            found.append(
                Piece(
                    tensor=name, dtype=_dtype(flat), shape=shape, first=first, count=flat.numel(),
                    data=partial(_on_host, flat),
                )
            )  # fmt: skip
    return found


def random_state(ranks: Ranks) -> dict[str, torch.Tensor]:
    """Of this rank's generator."""
    return {f"{RANDOM_STATE}{ranks.rank}": torch.get_rng_state()}


def own_pieces(tensors: Mapping[str, torch.Tensor]) -> list[Piece]:
    """Whole tensors that no other rank has."""
    return pieces(tensors, Ranks.single())


@torch.no_grad()
def restore(
    model: PolicyModel, optimizer: PolicyOptimizer, reader: TensorReader, stored: Mapping[str, StoredTensor]
) -> None:
    """Fill this rank's rows of weights and moments, in place: moments that wait on the host stay there."""
    tensors = weights_of(model)
    state = optimizer.adamw.state
    for name, parameter in _trained(model, optimizer):
        if f"{_STEP}/{name}" in stored:
            if not state[parameter]:
                # As AdamW makes them before its first update.
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
    """Does nothing for a rank that the writer did not have."""
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
