"""A transfer of weights for vLLM's own update calls: reads every tensor from a directory of safetensors files.

Loaded in each worker process as its extension (``--worker-extension-cls``); the import registers the transfer, which
``--weight-transfer-config`` names. vLLM's other transfers need a sender with a GPU; these weights lie in host memory.

Tied embeddings: on a CPU vLLM packs the head's matrix when it loads a model, and a reload of the embeddings changes the matrix
and not the pack, so the head would go on with the old weights and say nothing. After each reload the pack is made again, and
the head is tried: an update whose head does not compute with the new matrix is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tether
import torch
from safetensors import safe_open
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

NAME = "rollmill_stage"
_PACKED = "cpu_linear"  # the attribute with a packed matrix
_PROBES = 4  # rows of hidden states that a head is tried with
_WRONG = 0.05  # difference of a head's outputs, relative to their size; bf16 rounds by .01


@dataclass
class StageInit(WeightTransferInitInfo):
    """A directory needs no preparation."""


@dataclass
class StageUpdate(WeightTransferUpdateInfo):
    """``directory`` has all tensors of the model, by their Hugging Face names."""

    directory: str


class StagedWeights(WeightTransferEngine[StageInit, StageUpdate]):
    """Raises ``RuntimeError`` for weights that are not the model's, and for a head that keeps the weights of before."""

    init_info_cls = StageInit
    update_info_cls = StageUpdate

    def init_transfer_engine(self, init_info: StageInit) -> None:
        """Nothing: each update names its directory."""

    def start_weight_update(self) -> None:
        self._names = {name for name, _ in self.model.named_parameters()}
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: StageUpdate) -> None:
        loaded = self.model.load_weights(_tensors(Path(update_info.directory)))
        if loaded is not None and (absent := sorted(self._names - set(loaded))):
            raise RuntimeError(
                f"{update_info.directory} lacks {len(absent)} tensors of the model: {', '.join(absent[:4])}"
            )

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        for head in heads(self.model):
            if hasattr(head, _PACKED):
                head.quant_method.process_weights_after_loading(head)
        if problem := wrong_head(self.model, is_tied=_is_tied(self.model_config)):
            raise RuntimeError(problem)

    def shutdown(self) -> None:
        """Nothing is held."""


class Extension:
    """vLLM adds this class to its worker; it has no methods, because the import of this module is its purpose."""


def heads(model: torch.nn.Module) -> list[Any]:
    """The model's heads with a plain matrix."""
    found = [module for module in model.modules() if isinstance(module, ParallelLMHead)]
    return [head for head in found if isinstance(head.quant_method, UnquantizedEmbeddingMethod)]


def wrong_head(model: torch.nn.Module, *, is_tied: bool) -> str:
    """The reason why a head does not compute with the weights that were loaded; empty if it does."""
    embeddings = [
        module
        for module in model.modules()
        if isinstance(module, VocabParallelEmbedding) and not isinstance(module, ParallelLMHead)
    ]
    for head in heads(model):
        if is_tied and embeddings and head.weight.data_ptr() != embeddings[0].weight.data_ptr():
            return "tied embeddings: after the reload the head has another matrix than the embedding"
        matrix = head.weight.data
        generator = torch.Generator().manual_seed(0)
        probe = torch.randn(_PROBES, matrix.shape[1], generator=generator).to(matrix.device, matrix.dtype)
        expected = torch.nn.functional.linear(probe.float(), matrix.float())
        found = head.quant_method.apply(head, probe).float()
        if float((found - expected).abs().max()) > _WRONG * float(expected.abs().max()):
            return (
                "the head computes with other weights than those that were loaded: vLLM keeps a copy that the reload did "
                "not change" + (" (tied embeddings)" if is_tied else "")
            )
    return ""


def _is_tied(model_config: Any) -> bool:
    return bool(getattr(model_config.hf_text_config, "tie_word_embeddings", False))


def _tensors(directory: Path) -> Iterator[tuple[str, torch.Tensor]]:
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - the file is no dict
                yield name, file.get_tensor(name)


if NAME not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(NAME, StagedWeights)
tether.end_with_server()
