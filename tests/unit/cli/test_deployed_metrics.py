"""Metrics of a deployment: Prometheus asks every process, and the dashboard shows metrics that exist."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from services.cli.deploy.deploy import deploy
from services.common.config.loading import load_recipe
from services.common.errors import ConfigError
from tests.documented import DOCS
from tests.metrics_catalogue import CATALOGUE, markdown_table, step_metrics

REPOSITORY = Path(__file__).resolve().parents[3]
QUICKSTART = REPOSITORY / "recipes" / "quickstart"
ON = ["metrics.enabled=true"]
DASHBOARD = REPOSITORY / "deploy" / "grafana.json"
PANELS = json.loads(DASHBOARD.read_text())["panels"]


def test_every_metric_on_the_dashboard_exists() -> None:
    asked = {name for panel in PANELS for t in panel["targets"] for name in re.findall(r"rollmill_\w+", t["expr"])}
    assert len(asked) > 15
    assert asked <= {metric.name for metrics in CATALOGUE.values() for metric in metrics}


def test_every_metric_of_a_step_that_the_dashboard_shows_exists_and_says_what_it_is_taken_over() -> None:
    """Defect 12: no panel shows one population under the name of another."""
    for panel in PANELS:
        for target in panel["targets"]:
            for asked in re.findall(r'rollmill_step_metric\{metric=~?"([^"]+)"\}', target["expr"]):
                found = [m for m in step_metrics() if re.fullmatch(asked, m.name)]
                assert found, f"{panel['title']}: {asked}"
                assert all(m.of and m.help for m in found)


def test_prometheus_asks_every_process_of_the_pod_at_the_port_that_it_is_told(tmp_path: Path) -> None:
    deploy(QUICKSTART, "compose", tmp_path, ON)
    services = yaml.safe_load((tmp_path / "compose.yaml").read_text())["services"]
    (job,) = yaml.safe_load((tmp_path / "prometheus.yml").read_text())["scrape_configs"]
    ports = {c["labels"]["instance"]: int(c["targets"][0].rpartition(":")[2]) for c in job["static_configs"]}
    assert set(ports) == {"orchestrator", "inference-a", "trainer-model0", "publisher-model0", "envgateway"}
    assert len(set(ports.values())) == len(ports)
    for name in ("orchestrator", "inference-a", "trainer-model0", "envgateway"):
        overrides = [part for part in services[name]["command"] if part.startswith("metrics.")]
        assert load_recipe(QUICKSTART, overrides, {}).metrics.ports == ports
    assert services["prometheus"]["profiles"] == ["metrics"]
    assert services["node"]["ports"][-1] == "127.0.0.1:9090:9090"  # this machine alone
    assert (tmp_path / "grafana.json").read_text() == DASHBOARD.read_text()


def test_without_metrics_there_is_none_of_it(tmp_path: Path) -> None:
    deploy(QUICKSTART, "compose", tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"compose.yaml", "compose.gpu.yaml"}


def test_a_port_of_a_process_that_is_not_there_or_of_two_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"metrics\.ports names 'inference-z'"):
        load_recipe(QUICKSTART, [*ON, "metrics.ports.inference-z=9000"], {})
    with pytest.raises(ConfigError, match="both 9000"):
        load_recipe(QUICKSTART, [*ON, "metrics.ports.inference-a=9000", "metrics.ports.orchestrator=9000"], {})


def test_the_documented_table_is_what_the_code_exposes() -> None:
    assert (DOCS / "observability.md").read_text().count(markdown_table()) == 1, (
        "run: python -c 'from tests.metrics_catalogue import markdown_table; print(markdown_table())'"
    )
