"""Metrics: gauges of GetStatus under the field's names, over real HTTP, read back by Prometheus' own parser."""

from __future__ import annotations

import json
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from extras.prometheus.server import MetricsServer
from services.common.config.processes import MetricsConfig
from services.common.errors import ConfigError
from services.common.prometheus import Metric, metrics_server
from services.common.security import identity
from services.common.security.keys import Peer, Role
from services.common.telemetry.accounts import TimeAccount
from services.common.telemetry.metrics import ProcessStatus
from tests.keys import as_role, make_keys
from tests.metrics_catalogue import CATALOGUE

BUFFERED = Metric("rollmill_buffered_sequences", "gauge", "Sequences that wait.", "buffered/{policy}")
TOKENS = Metric("rollmill_tokens_generated_total", "counter", "Tokens sampled.", "tokens/{policy}")


@pytest.mark.parametrize("process", CATALOGUE)
def test_each_process_names_every_metric_and_source_once_and_explains_it(process: str) -> None:
    metrics = CATALOGUE[process]
    for values in ([m.name for m in metrics], [m.source for m in metrics if m.source]):
        assert len(values) == len(set(values))
    assert all(m.help.endswith(".") for m in metrics)


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[MetricsServer]:
    account = TimeAccount("trainer/model0")
    numbers = {"tokens/model0": 0.0}

    def status() -> ProcessStatus:
        numbers["tokens/model0"] += 10  # read at every scrape
        return ProcessStatus(
            service="inference", instance_id="a", run_id='run "1"', state="ready", started_at=1.0,
            gauges={"buffered/actor": 1.5, "strange": 2.0, **numbers}, accounts=(account.state(),),
        )  # fmt: skip

    found = metrics_server(
        MetricsConfig(enabled=True), status, [BUFFERED, TOKENS], name="inference-a", host="127.0.0.1", run_dir=tmp_path
    )
    assert found is not None
    await found.start()
    yield found
    await found.stop()


async def scrape(run_dir: Path) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """As Prometheus does: the address from the file, then the samples by name and labels."""
    (target,) = json.loads((run_dir / "prometheus" / "inference-a.json").read_text())
    assert target["labels"] == {"service": "inference", "instance": "inference-a", "run": 'run "1"'}
    async with aiohttp.ClientSession() as session, session.get(f"http://{target['targets'][0]}/metrics") as response:
        assert response.content_type == "text/plain"
        families = text_string_to_metric_families(await response.text())
    return {(s.name, tuple(sorted(s.labels.items()))): s.value for family in families for s in family.samples}


async def test_a_scrape_reads_what_is_true_now(server: MetricsServer, tmp_path: Path) -> None:
    first, second = await scrape(tmp_path), await scrape(tmp_path)
    tokens = ("rollmill_tokens_generated_total", (("policy", "model0"),))
    assert second[tokens] == first[tokens] + 10
    assert first["rollmill_buffered_sequences", (("policy", "actor"),)] == 1.5
    assert first["rollmill_other", (("gauge", "strange"),)] == 2.0
    about = (("id", "a"), ("run", 'run "1"'), ("service", "inference"), ("state", "ready"))
    assert first["rollmill_process_info", about] == 1.0
    idle = (("activity", "idle"), ("component", "trainer/model0"), ("on", ""))
    assert second["rollmill_activity_seconds_total", idle] > first["rollmill_activity_seconds_total", idle] >= 0
    assert first["process_resident_memory_bytes", ()] > 0


def test_metrics_are_off_unless_asked_for_and_never_open_to_strangers() -> None:
    def off() -> Any:
        raise AssertionError("nobody asks")

    assert metrics_server(MetricsConfig(), off, [], name="x", host="127.0.0.1", run_dir=None) is None
    with pytest.raises(ConfigError, match="may not bind"):
        metrics_server(MetricsConfig(enabled=True), off, [], name="x", host="0.0.0.0", run_dir=None)


async def test_with_keys_those_who_may_look_are_answered_over_tls_and_nobody_else(tmp_path: Path) -> None:
    keys = make_keys(tmp_path / "keys")

    def status() -> ProcessStatus:
        return ProcessStatus(service="orchestrator", instance_id="o", run_id="r1", state="ready", started_at=1.0)

    with identity.used(as_role(keys, Role.ORCHESTRATOR)):
        found = metrics_server(
            MetricsConfig(enabled=True), status, [], name="orchestrator", host="127.0.0.1", run_dir=tmp_path
        )
    assert found is not None
    port = await found.start()
    try:
        (target,) = json.loads((tmp_path / "prometheus" / "orchestrator.json").read_text())
        assert target["labels"]["__scheme__"] == "https"
        viewer = as_role(keys, Role.VIEWER)
        codes = {}
        # As Prometheus does it, with a token only and the name that every process of a run has.
        trust = ssl.create_default_context(cafile=str(viewer.folder / "ca.pem"))
        async with aiohttp.ClientSession() as session:
            for role in (Role.VIEWER, Role.OPERATOR, Role.INFERENCE, Role.AGENT, None):
                shown = {"Authorization": f"Bearer {as_role(keys, role).bundle.token}"} if role else {}
                async with session.get(
                    f"https://127.0.0.1:{port}/metrics",
                    ssl=trust,
                    server_hostname=Peer.MEMBER.dns_name,
                    headers=shown,
                ) as response:
                    codes[role] = response.status
    finally:
        await found.stop()
    assert codes == {Role.VIEWER: 200, Role.OPERATOR: 200, Role.INFERENCE: 403, Role.AGENT: 403, None: 401}
