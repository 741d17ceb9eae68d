"""Exports of checkpoints: from_pretrained loads the published weights bit for bit; the export needs no torch."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from services.common.checkpoints import MANIFEST, digest_of
from services.common.config.training import OptimizerConfig
from services.common.errors import ConfigError, CorruptDataError
from services.common.export import NOTE, export_checkpoint
from services.common.safetensors_files import weight_files
from services.common.text.chat import load_tokenizer
from services.trainer.checkpoints import Checkpoints, export_under_names_of_files, has_other_names_in_files, model_files
from services.trainer.model.optimizer import PolicyOptimizer
from services.trainer.model.policy_model import load_policy_model
from services.trainer.ranks import Ranks
from tests.unit.trainer.building import tiny_causal_lm, tiny_experts
from tests.unit.trainer_service.building import save_model
from tests.unit.trainer_service.test_checkpoint import IDENTITY
from tests.waiting import PROCESS_S

RANKS = Ranks.single()


def checkpoint(
    directory: Path, *, tied: bool = True, dtype: str = "float32", master: torch.dtype = torch.float32
) -> tuple[Path, dict[str, torch.Tensor]]:
    """A checkpoint of a small model with a value head, and the model's own weights."""
    source = save_model(directory / "model", tied=tied)
    model = load_policy_model(source, RANKS, dtype=master, value_head=True)
    files = model_files(model.causal_lm, load_tokenizer(source), dtype)
    checkpoints = Checkpoints(directory / "checkpoints", *IDENTITY, 2, RANKS, files)
    checkpoints.save(3, model, PolicyOptimizer(model.named_parameters(), OptimizerConfig(lr=1e-2)))
    shutil.rmtree(source)  # the checkpoint has all that it takes
    return checkpoints.path(3), dict(model.causal_lm.named_parameters())


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("master", [torch.float32, torch.bfloat16])
def test_from_pretrained_loads_an_export_of_a_checkpoint(
    tied: bool, dtype: str, master: torch.dtype, tmp_path: Path
) -> None:
    path, own = checkpoint(tmp_path, tied=tied, dtype=dtype, master=master)
    exported = export_checkpoint(path, tmp_path / "export", shard_bytes=4000)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    assert loaded.dtype is getattr(torch, dtype)
    found = dict(loaded.named_parameters())
    assert found.keys() == own.keys(), "a value head is the trainer's alone"
    for name, weight in found.items():
        assert torch.equal(weight, own[name].to(getattr(torch, dtype))), name
    assert AutoTokenizer.from_pretrained(tmp_path / "export").chat_template
    assert (tmp_path / "export" / "generation_config.json").is_file()
    assert len(list((tmp_path / "export").glob("*.safetensors"))) > 1
    note = json.loads((tmp_path / "export" / NOTE).read_text())
    assert note["checkpoint_digest"] == digest_of((path / MANIFEST).read_bytes()) == exported.checkpoint_digest
    assert (note["run_id"], note["policy"], note["training_step"], note["dtype"]) == ("r", "p", 3, dtype)


def test_weights_are_exported_from_a_checkpoint_whose_moments_are_damaged(tmp_path: Path) -> None:
    path, own = checkpoint(tmp_path)
    (path / "optimizer_00000.safetensors").write_bytes(b"")
    export_checkpoint(path, tmp_path / "export")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    assert all(torch.equal(weight, own[name]) for name, weight in loaded.named_parameters())


@pytest.mark.parametrize("file", ["weights_00000.safetensors", "model/tokenizer.json", "model/config.json", MANIFEST])
def test_a_checkpoint_is_verified_before_it_is_exported(file: str, tmp_path: Path) -> None:
    path, _ = checkpoint(tmp_path)
    content = bytearray((path / file).read_bytes())
    content[len(content) // 2] ^= 4
    (path / file).write_bytes(content)
    with pytest.raises(CorruptDataError, match=file):
        export_checkpoint(path, tmp_path / "export")
    assert not list(tmp_path.glob("export*"))


def test_an_export_replaces_an_export_and_nothing_else(tmp_path: Path) -> None:
    path, _ = checkpoint(tmp_path)
    for _ in range(2):
        export_checkpoint(path, tmp_path / "export")
    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.tex").write_text("years of work")
    with pytest.raises(ConfigError, match="exists and is no export"):
        export_checkpoint(path, other)
    assert (other / "thesis.tex").read_text() == "years of work"


def test_exporting_takes_neither_torch_nor_the_memory_of_the_model(tmp_path: Path) -> None:
    """A checkpoint of 320 MiB, merged from two parts of each weight, in a process with as much again of address space."""
    path, _ = checkpoint(tmp_path)
    script = """
import resource, sys
from pathlib import Path
from services.common.checkpoints import Piece, write_safetensors, write_bytes
from services.common.checkpoints import Manifest, StoredTensor, encode
from services.common.export import export_checkpoint

source, made = Path(sys.argv[1]), Path(sys.argv[2]) / "step_000001"
(made / "model").mkdir(parents=True)
rows, half = 40 << 20, 20 << 20
block = memoryview(bytes(8 << 20))
files = [write_bytes(made / "model" / "config.json", "model/config.json", b'{"dtype": "bfloat16"}')]
for rank in range(2):
    pieces = [
        Piece(tensor=f"weights/causal_lm.{n}", dtype="float32", shape=(half,), first=rank * half, count=half,
              data=lambda: [block] * 10)
        for n in "ab"
    ]
    name = f"weights_{rank:05d}.safetensors"
    files.append(write_safetensors(made / name, name, pieces, {}))
whole = StoredTensor(dtype="float32", shape=(rows,))
write_bytes(made / "manifest.json", "manifest.json", encode(Manifest(
    run_id="r", policy="p", training_step=1, num_updates=1, num_ranks=2, optimizer="adamw", written_at=0,
    tensors={f"weights/causal_lm.{n}": whole for n in "ab"}, files=tuple(files))))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
done = export_checkpoint(made, made.parent / "export")
grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
assert done.size_bytes == 160 << 20, done
assert grown < 100 << 10, f"{grown} KiB"
assert "torch" not in sys.modules
"""
    argv = [sys.executable, "-c", script, str(path), str(tmp_path / "large")]
    done = subprocess.run(argv, cwd=Path(__file__).parents[3], capture_output=True, text=True, timeout=PROCESS_S)
    assert done.returncode == 0, done.stderr


# -- The export of a model whose experts have other names in files is an ordinary Hugging Face directory with its weights.


def test_experts_are_exported_under_the_names_that_other_programs_read(tmp_path: Path) -> None:
    source = save_model(tmp_path / "model")
    tokenizer = load_tokenizer(source)
    tiny_experts().save_pretrained(tmp_path / "experts")
    model = load_policy_model(tmp_path / "experts", Ranks.single())
    assert has_other_names_in_files(model.causal_lm) and not has_other_names_in_files(tiny_causal_lm())
    target = tmp_path / "export" / "model0"
    for _ in range(2):  # exporting again replaces what is there
        export_under_names_of_files(model, tokenizer, target, Ranks.single(), torch.bfloat16)
    assert weight_files(target).keys() == weight_files(tmp_path / "experts").keys()
    assert json.loads((target / "config.json").read_text())["dtype"] == "bfloat16"
    loaded = AutoModelForCausalLM.from_pretrained(target)
    own = dict(model.causal_lm.named_parameters())
    for name, weight in loaded.named_parameters():
        assert torch.equal(weight, own[name].to(torch.bfloat16)), name
    assert AutoTokenizer.from_pretrained(target).get_vocab() == tokenizer.get_vocab()
    (tmp_path / "file").write_text("a file where a directory must be")
    with pytest.raises(OSError, match="file"):
        export_under_names_of_files(model, tokenizer, tmp_path / "file" / "model0", Ranks.single(), torch.bfloat16)
