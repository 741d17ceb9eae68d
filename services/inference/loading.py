"""Builds a served policy from a recipe: engine, tokenizer and weight updater.

The scripted engine needs no torch, tokenizer or checkpoint; this module imports torch only for other engines.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from services.common.config.processes import InferenceConfig, engine_numbers
from services.common.config.recipe import Recipe
from services.common.errors import ConfigError
from services.common.extras import load_extra
from services.common.importing import load_object
from services.common.rpc.run_client import RunSettings
from services.common.telemetry.accounts import TimeAccount, weights
from services.common.text.chat import Chat
from services.common.transfer.bulk import PayloadSource
from services.common.weights.snapshot import AdapterIdentity, version_digest
from services.inference.engine.base import ByteTokenizer, Engine, KvPolicy
from services.inference.engine.scripted import RandomTokens, ScriptedEngine
from services.inference.engine.streaming import EngineSetup, check_engine
from services.inference.rollouts import ServedPolicy
from services.inference.weights.fetch import Relay
from services.inference.weights.mirror import Mirror
from services.inference.weights.updater import UP_TO_DATE, AnnouncedVersions, SourceFetcher, WeightUpdater
from services.inference.workflows.scripts import ScriptBook, load_scripts

if TYPE_CHECKING:
    import torch

    from services.inference.engine.served.engine import ServedEngine, ServedSetup
    from services.inference.engine.torch.blocks import Adapter

# --- Selects this replica's section of the recipe.


def replica_config(
    recipe: Recipe, name: str, port: int | None = None, num_slots: int | None = None, host: str | None = None
) -> InferenceConfig:
    """The section ``inference.<name>`` with the command line's changes.

    A name that the recipe lacks takes the first section's settings on a free port, so that further replicas can join.
    """
    known = name in recipe.inference
    config = recipe.inference[name] if known else next(iter(recipe.inference.values()))
    changes: dict[str, Any] = {} if known else {"port": 0}
    if not known and config.endpoint.port is not None:
        changes["endpoint"] = config.endpoint.model_copy(update={"port": 0})
    if port is not None:
        changes["port"] = port
    if host is not None:
        changes["host"] = host
    if num_slots is not None:
        changes["num_slots"] = num_slots
    return config.model_copy(update=changes)


# --- The models below adapters: each is loaded once in a process, for all policies that have an adapter on it.


# By path, types and digest's algorithm, as long as an engine computes on them; and the digests in the trainer's type.
_bases: WeakValueDictionary[tuple[str, ...], Any] = WeakValueDictionary()
_digests: dict[tuple[str, ...], str] = {}


def load_adapter(
    policy: str, settings: RunSettings, dtype: str
) -> tuple[Any, dict[str, torch.Tensor], AdapterIdentity]:
    """The base of a policy in the engine's ``dtype``, the tensors of its adapter's version 0, and their identity.

    Raises the errors of ``services.common.text.chat.load_model``, and ``ConfigError`` for a target that is no
    linear module of the model.
    """
    import torch

    from services.common.lora import identity_of, initial_adapter, tensor_entry
    from services.common.text.chat import load_model
    from services.common.weights.snapshot import named_weights

    recipe = settings.recipe
    section, algorithm = recipe.policies[policy], recipe.digest_algorithm()
    assert section.adapter is not None
    key = (str(recipe.model_path(policy, settings.run_dir)), section.trainer.compute_dtype, dtype, algorithm)
    model = _bases.get(key)
    if model is None:
        model = load_model(key[0], section.trainer.compute_dtype)
        entries = [tensor_entry(name, weight, algorithm) for name, weight in named_weights(model).items()]
        model.requires_grad_(False)
        _bases[key], _digests[key] = model.to(getattr(torch, dtype)), version_digest(entries)
    rounded: torch.dtype = getattr(torch, section.trainer.master_dtype)  # as the trainer's are
    tensors = initial_adapter(model, section.adapter, recipe.run.seed)
    identity = identity_of(model, section.adapter, _digests[key])
    return model, {name: tensor.to(rounded) for name, tensor in tensors.items()}, identity


OnTokens = Callable[[int, float], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedPolicy:
    """One policy, ready to be started."""

    served: ServedPolicy
    weights: WeightUpdater | AnnouncedVersions  # keeps the engine on the newest version
    relay: PayloadSource | None = None  # serves the weights to other replicas; None without weights


def load_policy(
    policy: str,
    settings: RunSettings,
    config: InferenceConfig,
    on_tokens: OnTokens,
    *,
    owner: str = "",
) -> LoadedPolicy:
    """Build one policy; takes seconds with a model. ``owner`` is the replica's name, used in the names of its files.

    Raises ``ConfigError`` or ``ModelMismatchError``.
    """
    if config.engine == "scripted":
        return _load_scripted(policy, settings, config, on_tokens)
    settings, config = _on_device(policy, settings, config)
    if config.engine in ("torch", "forced"):
        return _load_torch(policy, settings, config, on_tokens)
    if config.servers is not None:
        return _load_served(policy, settings, config, on_tokens, owner or "replica")
    return _load_by_path(policy, settings, config, on_tokens)


def _on_device(policy: str, settings: RunSettings, config: InferenceConfig) -> tuple[RunSettings, InferenceConfig]:
    """The settings with the device of this service, and the types that follow from it. Raises ``ConfigError`` without it."""
    from services.common.system.devices import chosen_device, log_device
    from services.inference.engine.served.process import runs_on_cpu

    embedded = config.servers is None
    where = f"the device of the inference service of {policy}"
    device = chosen_device(config.device, where) if embedded else "cpu" if runs_on_cpu(config) else "cuda"
    config = InferenceConfig.model_validate({**config.model_dump(), "device": device})
    log_device(device, config.dtype, here=embedded)
    return replace(settings, recipe=settings.recipe.with_devices(has_gpu=device == "cuda")), config


def _load_scripted(policy: str, settings: RunSettings, config: InferenceConfig, on_tokens: OnTokens) -> LoadedPolicy:
    script = config.scripted
    engine = ScriptedEngine(
        script.script or RandomTokens(vocab_size=256, median_length=64.0),
        num_slots=config.num_slots,
        context_length=settings.recipe.policies[policy].model.context_length,
        tokens_per_second=script.tokens_per_s,
        latency_s=script.latency_s,
        kv_policy=KvPolicy(config.kv_policy),
        version=_first_version(policy, settings),
        on_tokens=on_tokens,
    )
    return _announced(policy, settings, engine)


def _announced(policy: str, settings: RunSettings, engine: Engine) -> LoadedPolicy:
    """A policy whose engine has no weights, and a tokenizer of bytes."""
    context_length = settings.recipe.policies[policy].model.context_length
    served = ServedPolicy(name=policy, engine=engine, chat=Chat(ByteTokenizer()), context_length=context_length)
    return LoadedPolicy(served=served, weights=AnnouncedVersions(policy, engine, _first_version(policy, settings)))


def _first_version(policy: str, settings: RunSettings) -> int:
    """Of an engine without weights: no orders come before the first version is held, and a run without training announces
    none."""
    return -1 if settings.recipe.policies[policy].trained and settings.recipe.run.steps else 0


def _load_by_path(policy: str, settings: RunSettings, config: InferenceConfig, on_tokens: OnTokens) -> LoadedPolicy:
    """An engine of the user's: with the weights of the policy, unless its class says ``has_weights = False``."""
    section = settings.recipe.policies[policy]
    kind: Any = load_object(config.engine)
    check_engine(kind, config.engine)
    setup = EngineSetup(
        policy=policy,
        context_length=section.model.context_length,
        num_slots=config.num_slots,
        device=config.device,
        dtype=config.dtype,
        settings=config.engine_settings,
        on_tokens=on_tokens,
    )
    if not getattr(kind, "has_weights", True):
        return _announced(policy, settings, kind(replace(setup, version=_first_version(policy, settings))))
    from services.common.text.chat import check_model_matches, load_model, load_tokenizer
    from services.common.weights.snapshot import named_weights

    model_path = settings.recipe.model_path(policy, settings.run_dir)
    model, tokenizer = load_model(model_path, section.trainer.master_dtype), load_tokenizer(model_path)
    check_model_matches(model, tokenizer=tokenizer)
    mirror = _filled_mirror(policy, settings, named_weights(model))
    del model
    engine = kind(replace(setup, model_path=str(model_path), weights=mirror.host_tensors()))
    return _followed(policy, settings, engine, tokenizer, mirror)


def _load_torch(policy: str, settings: RunSettings, config: InferenceConfig, on_tokens: OnTokens) -> LoadedPolicy:
    import torch

    from services.common.text.chat import check_model_matches, check_same_vocabulary, load_tokenizer
    from services.inference.engine.torch.engine import ReplayEngine, TorchEngine

    script = None
    if config.engine == "forced":  # before the model: a wrong setting fails within a second
        script = load_scripts(config.forced, settings.recipe)
    torch.set_num_threads(config.threads)
    section = settings.recipe.policies[policy]
    context_length = section.model.context_length
    tokenizer = load_tokenizer(settings.recipe.model_path(policy, settings.run_dir))
    if (teacher := settings.recipe.teachers.get(policy)) is not None:  # before the weights, which may take long to load
        other = load_tokenizer(settings.recipe.model_path(teacher, settings.run_dir))
        check_same_vocabulary(tokenizer, other, f"the teacher {teacher} of {policy}")
    model, mirror, adapter = _torch_weights(policy, settings, config)
    check_model_matches(model, tokenizer=tokenizer)
    kind = TorchEngine if script is None else ReplayEngine
    engine = kind(
        model,
        num_slots=1 if settings.recipe.run.deterministic else config.num_slots,
        context_length=context_length,
        kv_policy=KvPolicy(config.kv_policy),
        device=config.device,
        on_tokens=on_tokens,
        alone=settings.recipe.run.deterministic,
        adapter=adapter,
        kv_bytes=int(config.kv_cache_gib * (1 << 30)),
        stepping=config.stepping if config.device == "cuda" else "eager",
    )
    return _followed(policy, settings, engine, tokenizer, mirror, script)


def _torch_weights(policy: str, settings: RunSettings, config: InferenceConfig) -> tuple[Any, Mirror, Adapter | None]:
    """The model in the engine's type, the mirror of version 0, and the adapter if the policy has one."""
    import torch

    from services.common.text.chat import load_model
    from services.common.weights.snapshot import named_weights
    from services.inference.engine.torch.blocks import Adapter

    section = settings.recipe.policies[policy]
    path = settings.recipe.model_path(policy, settings.run_dir)
    if section.adapter is not None:
        model, tensors, identity = load_adapter(policy, settings, config.dtype)
        mirror = _filled_mirror(policy, settings, tensors, identity)
        return model, mirror, Adapter(tensors=mirror.host_tensors(), scale=identity.scale)
    # The mirror must hold the trainer's values: its master type, cast to the published one.
    model = load_model(path, section.trainer.master_dtype)
    mirror = _filled_mirror(policy, settings, named_weights(model))
    model = model.to(getattr(torch, config.dtype))
    # Precision beyond the published type must go: deltas change some elements, the others are that version's.
    published = mirror.host_tensors()
    for name, weight in named_weights(model).items():
        weight.copy_(published[name])
    return model, mirror, None


def _load_served(
    policy: str, settings: RunSettings, config: InferenceConfig, on_tokens: OnTokens, owner: str
) -> LoadedPolicy:
    from services.common.text.chat import check_model_matches, load_model, load_tokenizer
    from services.common.weights.snapshot import named_weights
    from services.inference.engine.served.engine import ServedSetup
    from services.inference.engine.served.process import own_gpus

    section = settings.recipe.policies[policy]
    path = settings.recipe.model_path(policy, settings.run_dir)
    tokenizer = load_tokenizer(path)
    adapter = None
    if section.adapter is not None:
        # The servers load the base themselves; this process needs its digest.
        model, tensors, adapter = load_adapter(policy, settings, section.trainer.compute_dtype)
        mirror = _filled_mirror(policy, settings, tensors, adapter)
    else:
        # Each element is cast as in the trainer: through the master type, unless that is the widest.
        master, published = section.trainer.master_dtype, section.published_dtype
        model = load_model(path, published if master == "float32" else master)
        mirror = _filled_mirror(policy, settings, named_weights(model))
    check_model_matches(model, tokenizer=tokenizer)
    del model
    served_policies = config.policies or list(settings.recipe.policies)
    numbers = engine_numbers(config, served_policies)
    gpus = own_gpus(config)
    before = sum(numbers[other] for other in served_policies[: served_policies.index(policy)])
    assert config.servers is not None
    parallel = config.servers.tensor_parallel
    number = numbers[policy]
    if not config.gpus and not config.engines and len(served_policies) == 1:
        number = max(1, len(gpus) // parallel)  # all the GPUs that the environment shows
    setup = ServedSetup(
        config=config,
        name=f"{owner}-{policy}",
        model_path=str(path),
        context_length=section.model.context_length,
        tensors=mirror.host_tensors(),
        number=number,
        gpus=gpus[before * parallel : (before + number) * parallel],
        directory=private_directory(settings),
        on_tokens=on_tokens,
        adapter=adapter,
    )
    engine = server_builder(config.engine)(setup)
    return _followed(policy, settings, engine, tokenizer, mirror)


def server_builder(engine: str) -> Callable[[ServedSetup], ServedEngine]:
    """Builds an engine over servers. Raises ``ConfigError`` for the engine of an extra that is not here."""
    try:
        build: Callable[[ServedSetup], ServedEngine] = load_extra("engines", engine)
    except KeyError:
        raise ConfigError(
            f"engine {engine} is in the folder extras/{engine}, which is not here: add it, or write engine: torch"
        ) from None
    return build


def private_directory(settings: RunSettings) -> Path:
    """The run's directory if this machine sees it; else a temporary directory that belongs to this user.

    Raises ``ConfigError`` if the temporary directory belongs to another user.
    """
    if settings.run_dir.is_dir():
        return settings.run_dir
    own = Path(tempfile.gettempdir()) / f"rollmill-{settings.run_id}"
    own.mkdir(mode=0o700, exist_ok=True)
    if own.is_symlink() or own.stat().st_uid != os.geteuid():
        raise ConfigError(f"{own} belongs to another user: remove it, or name a directory with --run-dir")
    return own


def _filled_mirror(
    policy: str, settings: RunSettings, weights: Mapping[str, Any], adapter: AdapterIdentity | None = None
) -> Mirror:
    """The mirror with the weights of the checkpoint, or the adapter's on it, version 0."""
    mirror = Mirror(policy)
    mirror.fill(
        weights,
        run_id=settings.run_id,
        version=0,
        dtype=settings.recipe.policies[policy].published_dtype,
        algorithm=settings.recipe.digest_algorithm(),
        adapter=adapter,
    )
    return mirror


def _followed(
    policy: str, settings: RunSettings, engine: Engine, tokenizer: Any, mirror: Mirror, script: ScriptBook | None = None
) -> LoadedPolicy:
    """A policy whose engine follows the published versions."""
    section = settings.recipe.policies[policy]
    served = ServedPolicy(
        name=policy, engine=engine, chat=Chat(tokenizer), context_length=section.model.context_length, script=script
    )
    relay = Relay(mirror)
    account = TimeAccount(weights(policy), rest=UP_TO_DATE)
    fetcher = SourceFetcher(settings.run_id, section.weights.transports, relay, on_bytes=account.beat)
    updater = WeightUpdater(mirror, engine, fetcher, account=account)
    return LoadedPolicy(served=served, weights=updater, relay=relay)
