"""Damaged files of a model directory are told with file and remedy, by `check` and by each loader."""

from __future__ import annotations

import json
import os
import pickle
import struct
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from services.cli.check.models import model_problems
from services.common.errors import ConfigError, ModelMismatchError
from services.common.export import _open_base
from services.common.safetensors_files import places, weight_files
from services.common.text.chat import load_model
from services.trainer.model.policy_model import load_policy_model
from services.trainer.ranks import Ranks
from tests.unit.trainer.building import tiny_causal_lm
from tests.unit.trainer_service.building import recipe, save_model

WHOLE = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


def header(text: str, length: int | None = None, body: int = 8) -> bytes:
    return struct.pack("<Q", len(text) if length is None else length) + text.encode() + b"\0" * body


def one(**changed: Any) -> bytes:
    return header(json.dumps({"w": {**WHOLE, **changed}}))


DAMAGED = {
    "length 2^63": header("{}", 1 << 63),
    "length 2^40": header("{}", 1 << 40),
    "nested": header("[" * 100_000),
    "nested object": header('{"a":' * 100_000),
    "list": header("[]"),
    "null": header("null"),
    "number for a tensor": header('{"w": 1}'),
    "huge shape": one(shape=[1 << 40, 1 << 40]),
    "negative shape": one(shape=[-2]),
    "infinite offset": header('{"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 1e999]}}'),
    "NaN offset": header('{"w": {"dtype": "F32", "shape": [2], "data_offsets": [NaN, 8]}}'),
    "text offset": one(data_offsets=["0", "8"]),
    "true offset": one(data_offsets=[False, 8]),
    "one offset": one(data_offsets=[0]),
    "backwards": one(data_offsets=[8, 0]),
    "gap": one(data_offsets=[4, 12]),
    "no type": one(dtype=None),
    "unknown type": one(dtype="X"),
    "short": header(json.dumps({"w": WHOLE}), body=4),
    "long": header(json.dumps({"w": WHOLE}), body=9),
    "empty": b"",
    "seven bytes": b"\0" * 7,
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_file_is_told_by_check_by_a_merge_and_at_load(name: str, tmp_path: Path) -> None:
    folder = Path(save_model(tmp_path / "model"))
    file = folder / "model.safetensors"
    file.write_bytes(DAMAGED[name])
    with pytest.raises(ConfigError, match=r"model\.safetensors .*copy it again"):
        places(file)
    with pytest.raises(ConfigError, match=r"model\.safetensors .*--base"):
        _open_base(folder)
    assert any(str(file) in problem for problem in model_problems(recipe(folder)))
    with pytest.raises(ConfigError, match=r"model\.safetensors"):
        load_policy_model(folder, Ranks.single())


@pytest.mark.parametrize(
    "place", ["../model.safetensors", "/etc/passwd", "..", "", "sub/model.safetensors", "gone.safetensors", 7, None]
)
def test_an_index_names_files_beside_it(place: Any, tmp_path: Path) -> None:
    folder = Path(save_model(tmp_path / "model"))
    (folder / "model.safetensors").rename(tmp_path / "model.safetensors")
    (folder / "other.safetensors").write_bytes(one())
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": place}}))
    for read in (weight_files, _open_base, load_model, lambda path: load_policy_model(path, Ranks.single())):
        with pytest.raises(ConfigError, match=r"index\.json names the file"):
            read(folder)
    assert any("names the file" in problem for problem in model_problems(recipe(folder)))


@pytest.mark.parametrize(
    "changed",
    [
        {"num_attention_heads": 0}, {"num_attention_heads": None}, {"hidden_size": "many"}, {"hidden_size": -8},
        {"num_hidden_layers": []}, {"vocab_size": 1.5}, {"rope_parameters": {"rope_type": "none"}}, {"hidden_act": "no"},
        {"model_type": 3}, {"model_type": "no_such"}, {"torch_dtype": 5}, {"layer_types": "x"},
    ],
)  # fmt: skip
def test_a_config_that_makes_no_model_is_a_users_error(changed: dict[str, Any], tmp_path: Path) -> None:
    folder = Path(save_model(tmp_path / "model"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changed}))
    model_problems(recipe(folder))
    with suppress(ConfigError, ModelMismatchError):  # any other error is a traceback
        load_policy_model(folder, Ranks.single())


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json", "tokenizer.json"])
@pytest.mark.parametrize("text", ["[" * 100_000, "{", "[]", "\xff"])
def test_a_damaged_json_file_is_told_by_check(name: str, text: str, tmp_path: Path) -> None:
    folder = Path(save_model(tmp_path / "model"))
    (folder / name).write_text(text, encoding="latin-1")
    (problem,) = model_problems(recipe(folder))
    assert name in problem and "copy it again" in problem


# --- hostile files


class Payload:
    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return os.system, (f"touch {self._mark}",)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.safetensors"])
def test_weights_that_are_a_pickle_are_refused_and_not_executed(name: str, tmp_path: Path) -> None:
    mark = tmp_path / "executed"
    directory = tmp_path / "model"
    tiny_causal_lm().save_pretrained(directory)
    (directory / "model.safetensors").unlink()
    (directory / name).write_bytes(pickle.dumps({"weight": Payload(mark)}))
    with pytest.raises(ConfigError, match="cannot load a causal language model"):
        load_model(directory)
    assert not mark.exists()
