"""Hugging Face models and tokenizers: loading, weight names, and the question whether two of them belong together.

Used by the inference service and the trainer, so that both agree on the names of weights. Independent of versions,
transport and training. The import is cheap: transformers (and the one model class that a checkpoint needs) is imported
on the first load. A local directory never leads to hub access, and code that comes with a checkpoint is never run:
transformers would ask at a terminal whether to.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from services.common.errors import ConfigError, ModelMismatchError
from services.common.safetensors_files import INDEX, read_object, weight_files

if TYPE_CHECKING:
    import torch

_CONFIG_FIELDS = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
    "tie_word_embeddings",
)


def load_model(path: str | Path, dtype: str | torch.dtype = "float32") -> Any:
    """A causal language model in evaluation mode on the CPU, from a local directory or a hub name."""
    import torch

    resolved = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(resolved, torch.dtype):
        raise ConfigError(f"unknown dtype {dtype!r}; write float32, bfloat16 or float16")
    local = _is_local(path, "config.json")
    from transformers import AutoModelForCausalLM

    if local:
        read_object(Path(path) / "config.json")
        if (Path(path) / INDEX).is_file():
            weight_files(Path(path))  # transformers opens any path that an index names
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            str(path),
            dtype=resolved,
            local_files_only=local,
            output_loading_info=True,
            trust_remote_code=False,
            use_safetensors=True,  # the other format is pickled
        )
    except RuntimeError as error:  # transformers' word for weights whose shapes do not fit the config
        raise ModelMismatchError(f"{path}: weights do not fit config.json: {error}") from error
    except MemoryError:
        raise
    except Exception as error:  # the code of any architecture, with numbers of any author
        pickled = sorted(each.name for each in Path(path).glob("*.bin")) if local else []
        hint = f"; {pickled[0]} is pickled and is not read: convert the weights to safetensors" if pickled else ""
        raise ConfigError(
            f"{path}: cannot load a causal language model: {type(error).__name__}: {error}{hint}"
        ) from error
    model, found = loaded
    # transformers only warns about these, and goes on with random weights.
    wrong = {kind: sorted(found[kind]) for kind in ("missing_keys", "unexpected_keys") if found[kind]}
    if wrong:
        raise ModelMismatchError(
            f"{path}: weights do not fit config.json: "
            + "; ".join(f"{kind.replace('_', ' ')} {', '.join(map(str, keys[:4]))}" for kind, keys in wrong.items())
        )
    return model.eval()


def load_tokenizer(path: str | Path) -> Any:
    """The tokenizer in the directory of a model, with the stop tokens of its generation_config.json as ``further_stops``, which
    ``Chat`` reads: the model ends turns with them too."""
    local = _is_local(path, "tokenizer_config.json")
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(path), local_files_only=local, trust_remote_code=False)
    except MemoryError:
        raise
    except Exception as error:  # tokenizers raises the base class
        raise ConfigError(
            f"{path}: cannot load a tokenizer: {type(error).__name__}: {error}; copy its files again from where the model came from"
        ) from error
    tokenizer.further_stops = _stops_of_generation(path, local, len(tokenizer))
    return tokenizer


def _stops_of_generation(path: str | Path, local: bool, num_tokens: int) -> tuple[int, ...]:
    from transformers import GenerationConfig

    if local and not (Path(path) / "generation_config.json").is_file():
        return ()
    try:
        told = GenerationConfig.from_pretrained(str(path), local_files_only=local).eos_token_id
    except OSError as error:
        if local:
            raise ConfigError(f"{path}/generation_config.json cannot be read: {error}") from error
        return ()  # the hub has none of this model
    stops = () if told is None else tuple(told) if isinstance(told, list) else (told,)
    if not all(isinstance(stop, int) and 0 <= stop < num_tokens for stop in stops):
        ids = f"the ids of the tokens that end a turn, of 0 to {num_tokens - 1}"
        raise ConfigError(f"{path}/generation_config.json: eos_token_id is {told!r}: write {ids}")
    return stops


def named_weights(model: Any) -> dict[str, torch.Tensor]:
    """Name to tensor in module order; tied weights once, under their first name (``model.embed_tokens.weight``)."""
    return {name: parameter.detach() for name, parameter in model.named_parameters(remove_duplicate=True)}


def check_model_matches(
    model: Any, *, tokenizer: Any = None, config: Any = None, where: str = "the other model"
) -> None:
    """``ModelMismatchError`` when a tokenizer has ids that the model lacks, or a config is of another architecture."""
    vocab_size = model.get_input_embeddings().weight.shape[0]
    if tokenizer is not None and len(tokenizer) > vocab_size:
        raise ModelMismatchError(
            f"vocabulary does not match: the tokenizer has {len(tokenizer)} tokens, the model only {vocab_size} "
            "embedding rows; use the tokenizer that was saved with the model, or resize the embeddings"
        )
    if config is not None:
        differences = [
            f"{name} is {getattr(model.config, name, None)} here but {getattr(config, name, None)} there"
            for name in _CONFIG_FIELDS
            if getattr(model.config, name, None) != getattr(config, name, None)
        ]
        if differences:
            raise ModelMismatchError(f"architecture does not match {where}: {'; '.join(differences)}")


def check_same_vocabulary(own: Any, other: Any, where: str) -> None:
    """``ModelMismatchError`` unless two tokenizers give every token the same id; ``where`` names the other's model."""
    difference = vocabulary_difference(own.get_vocab(), other.get_vocab())
    if difference is not None:
        raise ModelMismatchError(f"vocabulary does not match {where}: {difference}")


def vocabulary_difference(own: Mapping[str, int], other: Mapping[str, int]) -> str | None:
    """The difference between two maps of token to id, with the first tokens, and the remedy; None where they are equal.

    >>> vocabulary_difference({"a": 0}, {"a": 0, "b": 1})
    "1 tokens here, 2 there, 1 differ ('b' is missing here and 1 there); use models that share one tokenizer"
    """
    if own == other:
        return None
    differing = sorted(
        (token for token in own.keys() | other.keys() if own.get(token) != other.get(token)),
        key=lambda token: (own.get(token, len(own)), token),
    )
    examples = ", ".join(
        f"{token!r} is {own.get(token, 'missing')} here and {other.get(token, 'missing')} there"
        for token in differing[:3]
    )
    return (
        f"{len(own)} tokens here, {len(other)} there, {len(differing)} differ ({examples}); "
        "use models that share one tokenizer"
    )


def check_weights_match(expected: Mapping[str, Any], found: Mapping[str, Any], where: str = "the update") -> None:
    """``ModelMismatchError`` unless ``found`` has exactly the names of ``expected``, each with the same shape."""
    missing = [name for name in expected if name not in found]
    unexpected = [name for name in found if name not in expected]
    reshaped = [
        f"{name} has shape {tuple(found[name].shape)}, the model {tuple(tensor.shape)}"
        for name, tensor in expected.items()
        if name in found and tuple(found[name].shape) != tuple(tensor.shape)
    ]
    complaints = [
        f"{label}: {', '.join(names[:4])}{f' and {len(names) - 4} more' if len(names) > 4 else ''}"
        for label, names in (("missing", missing), ("unexpected", unexpected), ("other shape", reshaped))
        if names
    ]
    if complaints:
        raise ModelMismatchError(f"weights of {where} do not match the model: {'; '.join(complaints)}")


def _is_local(path: str | Path, marker: str) -> bool:
    """Whether ``path`` is a directory; an absolute or dotted path that is none is a mistake, not a hub name."""
    if Path(path).is_dir():
        if not (Path(path) / marker).is_file():
            raise ConfigError(f"{path}: no {marker} in this directory")
        return True
    if isinstance(path, Path) or str(path).startswith(("/", ".", "~")):
        raise ConfigError(f"{path}: no such directory")
    return False
