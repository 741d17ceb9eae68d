"""Variables that users of Code Judge know, over a recipe's section where one is given; for gateways and workers."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from pydantic import ValidationError

from services.common.config.envgateway import EnvGatewayConfig
from services.common.config.loading import explain, load_recipe, load_resolved
from services.common.config.recipe import Recipe
from services.common.errors import ConfigError
from services.common.extras import absent, provided
from services.common.net.hosts import is_loopback
from services.common.system.machine import num_cores

VARIABLES = """\
variables (over what a recipe says):
  REDIS_URI           where jobs wait, also REDIS_URL: redis://HOST:PORT, rediss://HOST:PORT (TLS), unix:///path
  REDIS_KEY_PREFIX    begins every key; gateways and workers with the same one work together (rollmill)
  MAX_WORKERS         programs run at once (CPUs that the process may use)
  MAX_EXECUTION_TIME  seconds that one program may run, wall clock and CPU (10)
  RUN_WORKERS         1: a gateway with REDIS_URI starts a worker as well (0)
  MAX_MEMORY          MiB that one program and its children may use (512)
  ALLOW_PLAIN_REDIS   1: use a Redis on another machine without TLS
  ALLOW_TIER_0        1: run programs without isolation where none works; trusted code only
"""


_MOST = 10**9  # of a variable: 30 years, a pebibyte


def parser_of(prog: str, description: str, variables: str = VARIABLES) -> argparse.ArgumentParser:
    """A parser with the options that ``recipe_of`` reads, and the ``variables`` below its help."""
    parser = argparse.ArgumentParser(
        prog=prog, description=description, epilog=variables, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--run-dir", type=Path, help="take the section envgateway of this run directory")
    source.add_argument("--recipe", type=Path, help="take the section envgateway of this recipe: serve without a run")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="a.b=c",
                        help="with --recipe: override a setting")  # fmt: skip
    return parser


def recipe_of(arguments: argparse.Namespace) -> Recipe | None:
    """The recipe that the options name, None for none. Raises ``ConfigError`` for one that has no gateway."""
    if arguments.run_dir is not None:
        recipe = load_resolved(arguments.run_dir)
    elif arguments.recipe is not None:
        recipe = load_recipe(arguments.recipe, arguments.overrides)
    else:
        return None
    if recipe.envgateway is None:
        raise ConfigError("the recipe has no gateway: write envgateway: {}")
    return recipe


def with_variables(
    config: EnvGatewayConfig | None, environment: Mapping[str, str] = os.environ
) -> tuple[EnvGatewayConfig, str]:
    """A recipe's section (None: Code Judge's defaults) under the variables; and the URI of Redis, empty for none.

    The URI stays out of the config, so that its password is not saved with a run.

    Raises:
        ConfigError: a variable that is not a number, or that contradicts the recipe; a URI that cannot be used; no queue over
            Redis in this installation.
    """
    tree = (config or EnvGatewayConfig()).model_dump()
    sandbox, queue = tree["sandbox"], tree["queue"]
    if config is None:
        sandbox |= {"num_slots": max(1, int(num_cores())), "wall_time_s": 10.0, "cpu_time_s": 10.0}
    if (slots := _number(environment, "MAX_WORKERS", int)) is not None:
        sandbox["num_slots"] = slots
    if (seconds := _number(environment, "MAX_EXECUTION_TIME", float)) is not None:
        sandbox["wall_time_s"] = sandbox["cpu_time_s"] = seconds
    if (mebibytes := _number(environment, "MAX_MEMORY", int)) is not None:
        sandbox["memory_bytes"] = int(mebibytes) << 20
    if _flag(environment, "ALLOW_TIER_0"):
        sandbox["allow_tier_0"] = True
    if _flag(environment, "ALLOW_PLAIN_REDIS"):
        queue["allow_plain_redis"] = True
    queue["redis_prefix"] = environment.get("REDIS_KEY_PREFIX") or queue["redis_prefix"]
    redis_uri = environment.get("REDIS_URI") or environment.get("REDIS_URL") or queue["redis_uri"]
    if redis_uri:
        check_redis(redis_uri, queue["allow_plain_redis"])
        if "redis" not in provided("queues"):
            raise ConfigError(
                f"{without_user(redis_uri)} cannot hold jobs (envgateway.queue.redis_uri): {absent('queues', 'redis')}"
            )
    try:
        return EnvGatewayConfig.model_validate(tree), redis_uri
    except ValidationError as error:  # a limit that a variable lowers may contradict the recipe
        raise ConfigError(
            "the variables and the recipe disagree: " + "; ".join(explain(error, EnvGatewayConfig))
        ) from None


def runs_worker(environment: Mapping[str, str] = os.environ) -> bool:
    return _flag(environment, "RUN_WORKERS")


def check_redis(uri: str, allow_plain: bool) -> None:
    """Raises ``ConfigError`` for no URI of Redis, or one that would send jobs over a network without TLS."""
    try:
        parts = urlsplit(uri)
        is_known = parts.scheme in ("redis", "rediss", "unix") and parts.port != 0
        is_known = is_known and "host" not in parse_qs(parts.query)  # counts where the URI has none before its path
    except ValueError:  # a port that is no number
        is_known = False
    if not is_known:
        raise ConfigError(
            f"{without_user(uri)} is no URI of Redis: write redis://HOST:PORT, rediss://HOST:PORT or unix:///PATH"
        )
    if parts.scheme == "redis" and not is_loopback(parts.hostname or "localhost") and not allow_plain:
        raise ConfigError(
            f"{without_user(uri)} would carry jobs and verdicts over a network without TLS: use rediss://, or, in a network "
            "that you trust, set envgateway.queue.allow_plain_redis: true (for workers the variable ALLOW_PLAIN_REDIS=1)"
        )


def without_user(uri: str) -> str:
    """The URI without user and password."""
    scheme, separator, rest = uri.partition("://")
    return f"{scheme}{separator}{rest.rpartition('@')[2]}"


def port_variables(environment: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Variables of a gateway without a recipe; recipes read these themselves."""
    settings: dict[str, Any] = {"http": {}}
    for name, section in (("ENVGATEWAY_PORT", settings), ("CODE_JUDGE_PORT", settings["http"])):
        if text := environment.get(name):
            if not text.isdigit():
                raise ConfigError(f"the variable {name} is {text!r}; it must be a port number")
            section["port"] = int(text)
    return settings


def _number(environment: Mapping[str, str], name: str, kind: Callable[[str], float]) -> float | None:
    text = environment.get(name)
    if not text:
        return None
    try:
        value = kind(text)
    except ValueError:
        value = 0
    if not 0 < value <= _MOST:
        raise ConfigError(f"the variable {name} is {text[:50]!r}; it must be a number above 0 and at most {_MOST}")
    return value


def _flag(environment: Mapping[str, str], name: str) -> bool:
    text = environment.get(name, "").lower()
    if text not in ("", "0", "1", "false", "true"):
        raise ConfigError(f"the variable {name} is {text!r}; it must be 0 or 1")
    return text in ("1", "true")
