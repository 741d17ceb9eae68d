"""From a recipe to a policy that can be served: engine, tokenizer, and who keeps its weights new.

The scripted engine needs neither torch nor a tokenizer nor a checkpoint, and nothing here imports torch for it.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from services.common.accounts import TimeAccount
from services.common.chat import Chat
from services.common.config.placement import engine_numbers
from services.common.config.services import InferenceConfig
from services.common.errors import ConfigError
from services.common.rpc.run_client import RunSettings
from services.common.transfer.source import PayloadSource
from services.common.types import FetchPlan, WeightTransfer, WeightVersion
from services.inference.byte_tokenizer import ByteTokenizer
from services.inference.engine.base import KvPolicy
from services.inference.engine.scripted import RandomTokens, ScriptedEngine
from services.inference.policies import ServedPolicy
from services.inference.scripts.registry import load_scripts
from services.inference.weights.announced import AnnouncedVersions

if TYPE_CHECKING:
    from services.inference.weights.mirror import Mirror

OnTokens = Callable[[int, float], None]


class WeightsFollower(Protocol):
    """Keeps one engine on the newest version."""

    account: TimeAccount  # of the policy's weights

    def offer(self, version: WeightVersion, plan: FetchPlan | None = None) -> None: ...
    def held(self) -> WeightVersion: ...
    def gauges(self) -> dict[str, float]: ...
    def take_transfers(self) -> tuple[WeightTransfer, ...]: ...
    async def run(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedPolicy:
    """One policy, ready to be started."""

    served: ServedPolicy
    weights: WeightsFollower
    relay: PayloadSource | None = None  # where others may fetch them; None when there are none


def load_policy(
    policy: str, settings: RunSettings, config: InferenceConfig, on_tokens: OnTokens, *, owner: str = ""
) -> LoadedPolicy:
    """Build one policy; takes seconds with a model. ``owner`` is the replica, for the names of what it leaves on disk.

    Raises ``ConfigError`` or ``ModelMismatchError``.
    """
    if config.engine == "scripted":
        return _load_scripted(policy, settings, config, on_tokens)
    if config.engine in ("torch", "forced"):
        return _load_torch(policy, settings, config, on_tokens)
    return _load_sglang(policy, settings, config, on_tokens, owner or "replica")


def _load_scripted(policy: str, settings: RunSettings, config: InferenceConfig, on_tokens: OnTokens) -> LoadedPolicy:
    script = config.scripted
    section = settings.recipe.policies[policy]
    context_length = section.model.context_length
    first = -1 if section.trained else 0  # no orders come before the first version is held
    engine = ScriptedEngine(
        script.script or RandomTokens(vocab_size=script.vocabulary, median_length=float(script.response_tokens)),
        num_slots=config.engine_slots or config.num_slots,
        context_length=context_length,
        tokens_per_second=script.tokens_per_s,
        latency_s=script.latency_s,
        kv_policy=KvPolicy(config.kv_policy),
        version=first,
        on_tokens=on_tokens,
    )
    served = ServedPolicy(name=policy, engine=engine, chat=Chat(ByteTokenizer()), context_length=context_length)
    return LoadedPolicy(served=served, weights=AnnouncedVersions(policy, engine, first))


def _load_torch(policy: str, settings: RunSettings, config: InferenceConfig, on_tokens: OnTokens) -> LoadedPolicy:
    import torch

    from services.common.devices import chosen_device
    from services.common.models import (
        check_model_matches,
        check_same_vocabulary,
        load_model,
        load_tokenizer,
        named_weights,
    )
    from services.inference.engine.forced import ForcedEngine
    from services.inference.engine.torch_engine import TorchEngine

    script = None
    if config.engine == "forced":  # before the model: a wrong setting costs a second
        script = load_scripts(config.forced, settings.recipe)
    device = chosen_device(config.device, f"the device of the inference service of {policy}")  # likewise
    torch.set_num_threads(config.threads)
    section = settings.recipe.policies[policy]
    context_length = section.model.context_length
    path = settings.recipe.model_path(policy, settings.run_dir)
    tokenizer = load_tokenizer(path)
    if (teacher := settings.recipe.teachers.get(policy)) is not None:  # before the weights, which may take long to load
        other = load_tokenizer(settings.recipe.model_path(teacher, settings.run_dir))
        check_same_vocabulary(tokenizer, other, f"the teacher {teacher} of {policy}")
    # The mirror must see what the trainer sees: its master type, cast to the published one.
    model = load_model(path, section.trainer.master_dtype)
    check_model_matches(model, tokenizer=tokenizer)
    mirror = _filled_mirror(policy, settings, named_weights(model))
    model = model.to(getattr(torch, config.dtype))
    # What the master type has beyond the published one must go: deltas change some elements, the others are that version's.
    published = mirror.host_tensors()
    for name, weight in named_weights(model).items():
        weight.copy_(published[name])
    kind = TorchEngine if script is None else ForcedEngine
    engine = kind(
        model,
        num_slots=1 if settings.recipe.run.deterministic else config.engine_slots or config.num_slots,
        context_length=context_length,
        kv_policy=KvPolicy(config.kv_policy),
        device=device,
        on_tokens=on_tokens,
        alone=settings.recipe.run.deterministic,
    )
    served = ServedPolicy(
        name=policy, engine=engine, chat=Chat(tokenizer), context_length=context_length, script=script
    )
    return _followed(served, settings, mirror)


def _load_sglang(
    policy: str, settings: RunSettings, config: InferenceConfig, on_tokens: OnTokens, owner: str
) -> LoadedPolicy:
    from services.common.models import check_model_matches, load_model, load_tokenizer, named_weights
    from services.inference.engine.sglang.build import build_engine
    from services.inference.engine.sglang.environment import own_gpus

    section = settings.recipe.policies[policy]
    path = settings.recipe.model_path(policy, settings.run_dir)
    # Each element is cast as the trainer casts it, so through its master type unless that is the widest.
    master, published = section.trainer.master_dtype, section.weights.publish_dtype
    model = load_model(path, published if master == "float32" else master)
    tokenizer = load_tokenizer(path)
    check_model_matches(model, tokenizer=tokenizer)
    mirror = _filled_mirror(policy, settings, named_weights(model))
    del model
    served_policies = config.policies or list(settings.recipe.policies)
    numbers = engine_numbers(config, served_policies)
    gpus = own_gpus(config)
    before = sum(numbers[other] for other in served_policies[: served_policies.index(policy)])
    parallel = config.sglang.tensor_parallel
    number = numbers[policy]
    if not config.gpus and not config.engines and len(served_policies) == 1:
        number = max(1, len(gpus) // parallel)  # all the GPUs that the environment shows
    engine = build_engine(
        config,
        name=f"{owner}-{policy}",
        model_path=str(path),
        context_length=section.model.context_length,
        tensors=mirror.host_tensors(),
        number=number,
        gpus=gpus[before * parallel : (before + number) * parallel],
        directory=_directory(settings),
        on_tokens=on_tokens,
    )
    served = ServedPolicy(name=policy, engine=engine, chat=Chat(tokenizer), context_length=section.model.context_length)
    return _followed(served, settings, mirror)


def _directory(settings: RunSettings) -> Path:
    """The run's, where this machine sees it; else one below the temporary ones that nobody else can have prepared.

    Raises ``ConfigError`` when somebody has.
    """
    if settings.run_dir.is_dir():
        return settings.run_dir
    own = Path(tempfile.gettempdir()) / f"millrace-{settings.run_id}"
    own.mkdir(mode=0o700, exist_ok=True)
    if own.is_symlink() or own.stat().st_uid != os.geteuid():
        raise ConfigError(f"{own} is somebody else's: remove it, or name a directory with --run-dir")
    return own


def _filled_mirror(policy: str, settings: RunSettings, weights: Mapping[str, Any]) -> Mirror:
    """The mirror with the weights of the checkpoint, version 0."""
    from services.inference.weights.mirror import Mirror

    mirror = Mirror(policy)
    mirror.fill(
        weights,
        run_id=settings.run_id,
        version=0,
        dtype=settings.recipe.policies[policy].weights.publish_dtype,
        algorithm=settings.recipe.digest_algorithm(policy),
    )
    return mirror


def _followed(served: ServedPolicy, settings: RunSettings, mirror: Mirror) -> LoadedPolicy:
    """A policy whose engine follows the published versions."""
    from services.inference.weights.fetcher import SourceFetcher
    from services.inference.weights.relay import Relay
    from services.inference.weights.updater import UP_TO_DATE, WeightUpdater

    relay = Relay(mirror)
    transports = settings.recipe.policies[served.name].weights.transports
    account = TimeAccount(f"weights/{mirror.policy}", rest=UP_TO_DATE)
    fetcher = SourceFetcher(lambda: settings.run_id, transports, relay, on_bytes=account.beat)
    updater = WeightUpdater(mirror, served.engine, fetcher, account=account)
    return LoadedPolicy(served=served, weights=updater, relay=relay)
