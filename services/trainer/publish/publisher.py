"""Runs the weight publisher in its own process, so that serving weights does not use the trainer's interpreter.

    python -m services.trainer.publish.publisher --run-id RUN --policy model0 --port 19861

The trainer names snapshot files on standard input (JSON lines, each answered by one on standard output). The publisher
maps the files and serves them over ``WeightService``. The publisher ends with its trainer, and imports no torch.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import structlog

from services.common.config.processes.services import MetricsConfig
from services.common.config.training.policy import WeightsConfig
from services.common.errors import RollmillError
from services.common.prometheus import serve_metrics
from services.common.rpc.interceptors import AccountInterceptor
from services.common.rpc.server import Server
from services.common.security import identity
from services.common.security.roles import Role
from services.common.system.child import die_with_parent_if_asked
from services.common.system.memory import keep_freed_memory
from services.common.system.threads import Watchdog
from services.common.telemetry.accounts import Activity, TimeAccount
from services.common.telemetry.activities import ActivityName
from services.common.telemetry.components import publisher
from services.common.telemetry.logs import configure
from services.common.transfer.servicer import add_weight_service
from services.trainer.prometheus import PUBLISHER_METRICS
from services.trainer.publish.publisher_store import PublisherStore

log = structlog.get_logger()

_ACTIVITIES = {
    "/rollmill.v1.WeightService/GetManifest": ActivityName.PREPARING_PAYLOAD,
    "/rollmill.v1.WeightService/FetchWeights": ActivityName.SENDING_WEIGHTS,
}
WAITING_RECEIVERS = 64  # threads in which requests wait for a delta, while others are answered


def main() -> None:
    arguments = _parser().parse_args()
    die_with_parent_if_asked()
    keep_freed_memory(one_arena=True)
    configure("publisher", arguments.run_dir, f"publisher-{arguments.policy}")
    try:
        identity.configure(Role.PUBLISHER)
        asyncio.run(_serve(arguments))
    except RollmillError as error:
        _answer({"error": error.message})
        raise SystemExit(f"error: {error.message}") from None


async def _serve(arguments: argparse.Namespace) -> None:
    config: WeightsConfig = arguments.weights
    store = PublisherStore(arguments.run_id, arguments.policy, config)
    waiting = ThreadPoolExecutor(WAITING_RECEIVERS, "publisher.payload")
    asyncio.get_running_loop().set_default_executor(waiting)
    account = TimeAccount(publisher(arguments.policy), rest=Activity(ActivityName.NOT_ASKED))
    server = Server(
        service="publisher",
        instance_id=f"publisher-{arguments.policy}",
        host=config.host if arguments.host is None else arguments.host,
        port=config.port if arguments.port is None else arguments.port,
        run_id=arguments.run_id,
        port_setting=f"policies.{arguments.policy}.weights.port",
        interceptors=[AccountInterceptor(account, _ACTIVITIES)],
    )
    servicer = await add_weight_service(
        server,
        {arguments.policy: store},
        send_bytes_per_s=config.send_bytes_per_s,
        bulk_wanted="bulk" in config.transports,
    )
    server.set_gauges(lambda: {**store.gauges(), "bytes_sent": float(servicer.budget.num_bytes_sent)})
    server.set_accounts(lambda: [account.state()])
    watchdog = Watchdog()
    watchdog.start()
    await server.start()
    await serve_metrics(
        server,
        arguments.metrics,
        PUBLISHER_METRICS,
        name=f"publisher-{arguments.policy}",
        run_dir=arguments.run_dir,
    )
    _answer({"address": server.address})
    commands = asyncio.create_task(_apply_commands(store, server), name="publisher.commands")
    try:
        await server.wait_for_stop()
    finally:
        watchdog.stop()
        commands.cancel()
        await server.stop(grace_s=1.0)
        store.close()


async def _apply_commands(store: PublisherStore, server: Server) -> None:
    """Add the snapshots that standard input names, until its end: the end of the trainer."""
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    is_ready = False
    while line := await reader.readline():
        path = Path(json.loads(line)["add"])
        try:
            manifest = store.add(path)
        except (RollmillError, OSError) as error:
            log.error("snapshot.refused", path=str(path), error=str(error))
            _answer({"error": f"{path}: {error}"})
            continue
        if not is_ready:
            server.set_ready()
            is_ready = True
        log.info("snapshot.served", version=manifest.version, size_bytes=manifest.size_bytes)
        _answer({"version": manifest.version, "digest": manifest.digest})
    server.request_stop()


def _answer(answer: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m services.trainer.publish.publisher",
        description="Serve the weight versions of one policy. Started by its trainer, which names snapshots on stdin.",
    )
    parser.add_argument("--run-id", required=True, help="the run; other runs are refused")
    parser.add_argument("--policy", required=True, help="the policy of the served versions")
    parser.add_argument("--host", help="bind address instead of the section's; without keys only loopback")
    parser.add_argument(
        "--weights",
        type=WeightsConfig.model_validate_json,
        default=WeightsConfig(),
        metavar="JSON",
        help="the policy's section `weights` of the recipe",
    )
    parser.add_argument(
        "--metrics",
        type=MetricsConfig.model_validate_json,
        default=MetricsConfig(),
        metavar="JSON",
        help="the section `metrics` of the recipe",
    )
    parser.add_argument("--port", type=int, help="gRPC port instead of the section's; 0 takes a free one")
    parser.add_argument("--run-dir", type=Path, default=None, help="where to write logs")
    return parser


if __name__ == "__main__":
    main()
