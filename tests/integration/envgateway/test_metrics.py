"""Metrics of a gateway that has worked: every gauge has a name that Prometheus' users know."""

from __future__ import annotations

import json
from pathlib import Path

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from services.common.config.envgateway import EnvGatewayConfig
from services.common.config.processes import MetricsConfig
from services.common.pb import environment_pb2, environment_pb2_grpc
from services.common.rpc.client import channel
from services.envgateway.app import Gateway
from services.envgateway.sandbox.pool import SandboxPool
from tests.integration.envgateway.conftest import CONFIG
from tests.waiting import WAIT_S


async def test_a_gateway_reports_its_runs_to_prometheus(pool: SandboxPool, tmp_path: Path) -> None:
    config = EnvGatewayConfig(port=0, sandbox=CONFIG)
    gateway = Gateway(config, pool, "run-1", metrics=MetricsConfig(enabled=True), run_dir=tmp_path)
    port = await gateway.start()
    try:
        async with channel(f"127.0.0.1:{port}") as connection:
            stub = environment_pb2_grpc.CodeExecutionServiceStub(connection)
            request = environment_pb2.ExecuteCodeRequest(request_id="1", language="python", code="print(1)")
            await stub.ExecuteCode(request, timeout=WAIT_S)
        (target,) = json.loads((tmp_path / "prometheus" / "envgateway.json").read_text())
        async with aiohttp.ClientSession() as session:
            async with session.get(f"http://{target['targets'][0]}/metrics") as response:
                families = {family.name: family for family in text_string_to_metric_families(await response.text())}
    finally:
        await gateway.stop()
    assert "rollmill_other" not in families
    ran = {sample.labels["outcome"]: sample.value for sample in families["rollmill_sandbox_runs"].samples}
    assert ran["ok"] == 1
    lanes = {sample.labels["lane"] for sample in families["rollmill_judge_queue_waiting_jobs"].samples}
    assert len(lanes) > 1
    assert families["rollmill_judge_job_seconds"].samples[0].value > 0
    assert families["rollmill_process_info"].samples[0].labels["run"] == "run-1"
