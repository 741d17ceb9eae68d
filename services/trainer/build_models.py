"""Makes the models that a recipe builds rather than loads: ``python -m services.trainer.build_models --run-dir DIR``.

One directory per policy with ``model.builder``, once per run directory. Policies get seeds of their own, so that two of
one kind do not begin as the same model.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import xxhash

from services.common.config.loading import load_resolved
from services.common.config.recipe import Recipe, built_model_dir
from services.common.errors import ConfigError, MillraceError, UserError
from services.common.importing import load_object
from services.common.logs import configure
from services.common.process import die_with_parent_if_asked
from services.trainer.made_directory import make_directory


def build_models(recipe: Recipe, run_dir: Path) -> list[Path]:
    """The directories of all built models; what is there already is left alone.

    Raises:
        ConfigError: a builder cannot be found or does not take its settings, or other settings made what is there.
    """
    made = []
    for name, policy in recipe.policies.items():
        if policy.model.builder is None:
            continue
        target = built_model_dir(run_dir, name)
        seed = xxhash.xxh3_64_intdigest(f"{recipe.run.seed}/{name}".encode()) % 2**31
        _build(target, f"policies.{name}.model.builder", policy.model.builder, policy.model.builder_settings, seed)
        made.append(target)
    return made


def _build(target: Path, where: str, builder: str, settings: dict[str, object], seed: int) -> None:
    def make(directory: Path) -> None:
        try:
            load_object(builder)(directory, seed=seed, **settings)
        except TypeError as error:
            raise ConfigError(f"{where}: {builder} failed with settings {settings}: {error}") from error

    make_directory(target, "model", {"builder": builder, "settings": settings, "seed": seed}, make)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m services.trainer.build_models",
        description="Make the models of a run that are built rather than loaded (policies.<name>.model.builder).",
    )
    parser.add_argument("--run-dir", type=Path, required=True, help="the run directory, which holds recipe.json")
    arguments = parser.parse_args()
    die_with_parent_if_asked()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    try:
        recipe = load_resolved(arguments.run_dir)
        configure("build-models", arguments.run_dir)
        build_models(recipe, arguments.run_dir)
    except MillraceError as error:
        sys.stderr.write(f"build models: {error.message}\n")
        return 2 if isinstance(error, UserError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
