"""The cases of the loading tests for each rank; started by ``launching.fork_ranks``. Every rank writes its
observations.

python -m tests.integration.trainer.loading_cases OUT_DIR MODELS_DIR
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from services.common.system.child import run_and_leave
from services.common.text.chat import load_model
from services.common.weights.snapshot import named_weights
from services.trainer.model.policy_model import PolicyModel, build_policy_model, load_policy_model, open_by_shards
from services.trainer.ranks import Ranks, full, init_ranks, leave_ranks, local_rows
from tests.unit.trainer.building import tiny_causal_lm, tiny_experts
from tests.unit.trainer_service.building import save_model

MASTERS = {"float32": torch.float32, "bfloat16": torch.bfloat16}
MIB = 1 << 20


def make_models(directory: Path) -> None:
    """Tied and untied, in one type each, one in many files, one with experts, and one that is large beside an interpreter's needs."""
    for tied, stored in ((True, "float32"), (False, "bfloat16")):
        name = f"{'tied' if tied else 'untied'}_{stored}"
        save_model(directory / name, dtype=getattr(torch, stored), tied=tied)
    tiny_causal_lm(tied=False).save_pretrained(directory / "many_files", max_shard_size="4KB")
    tiny_experts().to(torch.bfloat16).save_pretrained(directory / "experts_bfloat16", max_shard_size="4KB")
    large = Qwen3Config(
        vocab_size=20_000, hidden_size=512, intermediate_size=2048, num_hidden_layers=6, num_attention_heads=8,
        num_key_value_heads=4, head_dim=64, tie_word_embeddings=False,
    )  # fmt: skip
    Qwen3ForCausalLM(large).to(torch.bfloat16).save_pretrained(directory / "large")  # 44 M parameters


def compare(path: Path, dtype: torch.dtype, ranks: Ranks, offload: bool) -> dict[str, Any]:
    """Loaded by shards against ``from_pretrained``, weights and buffers, bit for bit."""
    expected = load_model(path, dtype)
    found = load_policy_model(path, ranks, dtype=dtype, trainable=not offload, offload=offload)
    weights, plain = named_weights(found.causal_lm), named_weights(expected)
    buffers = dict(found.causal_lm.named_buffers())
    return {
        "names": list(weights) == list(plain),
        "weights": all(torch.equal(full(weights[name]), plain[name]) for name in plain),
        "dtypes": {str(weight.dtype) for weight in weights.values()} == {str(dtype)},
        "buffers": buffers.keys() == dict(expected.named_buffers()).keys()
        and all(torch.equal(buffers[name], value) for name, value in expected.named_buffers()),
        "tied": (found.causal_lm.get_output_embeddings().weight is found.causal_lm.get_input_embeddings().weight)
        == expected.config.tie_word_embeddings,
        "logprobs": torch.equal(_logprobs(found), _logprobs(build_policy_model(expected, ranks, trainable=False))),
    }


@torch.no_grad()
def _logprobs(model: PolicyModel) -> torch.Tensor:
    from services.trainer.model.attention import Documents
    from services.trainer.model.logprobs import Targets

    ids = torch.arange(12) % 31
    documents = Documents.from_offsets(torch.tensor([0, 7, 12]).numpy())
    positions = torch.cat([torch.arange(7), torch.arange(5)])
    logprobs, _ = model(ids, positions, documents, Targets.at(torch.tensor([2, 5, 9]), ids), 1.0)
    return torch.as_tensor(logprobs)


def peak_memory(path: Path, ranks: Ranks) -> dict[str, int]:
    """Bytes of the largest growth of the process during the load, and bytes read."""
    before = _high_water()
    opened = open_by_shards(path, torch.float32)
    assert opened is not None
    model = build_policy_model(opened.causal_lm, ranks)
    read = opened.materialize(model, ranks.device)
    held = sum(local_rows(weight)[0].numel() for weight in named_weights(model.causal_lm).values())
    return {"peak": _high_water() - before, "read": read, "held": held * 4}


def _high_water() -> int:
    """Most bytes that this process ever had resident, mapped files included."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def run(out_dir: Path, models: Path) -> None:
    ranks = init_ranks(timeout_s=240.0, device="cpu", always_group=True)
    said: dict[str, Any] = {}
    for path in sorted(path for path in models.iterdir() if path.name != "large"):
        for name, dtype in MASTERS.items():
            said[f"{path.name} as {name}"] = compare(path, dtype, ranks, offload=False)
    said["offloaded"] = compare(models / "untied_bfloat16", torch.float32, ranks, offload=True)
    said["large"] = peak_memory(models / "large", ranks)  # last: imports and pools are warm by now
    (out_dir / f"rank{ranks.rank}.json").write_text(json.dumps(said))
    leave_ranks()


def main() -> int:
    torch.set_num_threads(1)
    run(Path(sys.argv[1]), Path(sys.argv[2]))
    return 0


if __name__ == "__main__":
    run_and_leave(main)
