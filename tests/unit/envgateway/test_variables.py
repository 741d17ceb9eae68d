"""Code Judge's variables over a recipe's section: precedence, refused values, and values that stay out of a saved
config."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.common.config.envgateway import EnvGatewayConfig
from services.common.config.loading import load_recipe
from services.common.errors import ConfigError
from services.envgateway import variables
from services.envgateway.variables import port_variables, with_variables

RECIPE = Path(__file__).resolve().parents[3] / "recipes" / "quickstart"
SECTION = EnvGatewayConfig.model_validate(
    {"sandbox": {"num_slots": 3, "wall_time_s": 2.0}, "queue": {"redis_uri": "redis://127.0.0.1:1", "lease_s": 5}}
)


def test_without_a_recipe_the_limits_are_code_judges() -> None:
    config, redis_uri = with_variables(None, {})
    assert (config.sandbox.wall_time_s, config.sandbox.cpu_time_s, redis_uri) == (10.0, 10.0, "")


def test_without_a_recipe_as_many_programs_run_as_the_process_has_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(variables, "num_cores", lambda: 2)
    assert with_variables(None, {})[0].sandbox.num_slots == 2
    assert with_variables(None, {"MAX_WORKERS": "3"})[0].sandbox.num_slots == 3


def test_variables_override_the_recipe_and_absent_ones_keep_its_values() -> None:
    told = {"MAX_WORKERS": "64", "MAX_EXECUTION_TIME": "4", "MAX_MEMORY": "100", "REDIS_KEY_PREFIX": "p"}
    config, redis_uri = with_variables(SECTION, told)
    sandbox = config.sandbox
    assert (sandbox.num_slots, sandbox.wall_time_s, sandbox.cpu_time_s) == (64, 4.0, 4.0)
    assert (sandbox.memory_bytes, config.queue.redis_prefix, config.queue.lease_s) == (100 << 20, "p", 5)
    assert redis_uri == "redis://127.0.0.1:1"
    assert with_variables(SECTION, {})[0] == SECTION


def test_a_time_below_the_recipes_case_time_is_refused_with_both() -> None:
    section = EnvGatewayConfig.model_validate(
        {"sandbox": {"wall_time_s": 6, "cpu_time_s": 6}, "code": {"case_time_s": 6}}
    )
    assert with_variables(section, {"MAX_EXECUTION_TIME": "6"})[0] == section
    with pytest.raises(ConfigError, match=r"code\.case_time_s is 6, but envgateway\.sandbox\.wall_time_s is 4"):
        with_variables(section, {"MAX_EXECUTION_TIME": "4"})


@pytest.mark.parametrize(
    ("environment", "uri"),
    [
        ({"REDIS_URI": "redis://127.0.0.1:2", "REDIS_URL": "redis://127.0.0.1:3"}, "redis://127.0.0.1:2"),
        ({"REDIS_URL": "redis://:secret@localhost"}, "redis://:secret@localhost"),
        ({"REDIS_URI": "", "REDIS_URL": ""}, "redis://127.0.0.1:1"),
    ],
)
def test_either_name_of_redis_will_do_and_is_not_saved(environment: dict[str, str], uri: str) -> None:
    config, redis_uri = with_variables(SECTION, environment)
    assert redis_uri == uri and "secret" not in config.model_dump_json()


@pytest.mark.parametrize(
    ("name", "text"),
    [("MAX_WORKERS", "many"), ("MAX_WORKERS", "0"), ("MAX_EXECUTION_TIME", "inf"), ("MAX_EXECUTION_TIME", "nan"),
     ("MAX_MEMORY", "-1"), ("MAX_MEMORY", "1" + "0" * 20), ("MAX_WORKERS", "9" * 30), ("ALLOW_TIER_0", "yes")],
)  # fmt: skip
def test_a_variable_that_is_not_a_number_is_refused_by_name(name: str, text: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} is '{text}'"):
        with_variables(None, {name: text})


@pytest.mark.parametrize("uri", ["redis://?host=10.0.0.9", "redis:///0?db=1&host=10.0.0.9", "redis://?%68ost=10.0.0.9"])
def test_a_host_of_redis_in_a_query_is_refused(uri: str) -> None:
    with pytest.raises(ConfigError, match=r"write redis://HOST:PORT"):
        with_variables(None, {"REDIS_URI": uri})


def test_a_redis_without_the_extra_is_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(variables, "provided", lambda kind: {})
    with pytest.raises(ConfigError, match="install Rollmill with its folder extras"):
        with_variables(SECTION, {})


def test_the_port_of_the_http_interface_comes_from_its_variable_with_and_without_a_recipe() -> None:
    assert port_variables({"CODE_JUDGE_PORT": "8000", "ENVGATEWAY_PORT": "1"}) == {"port": 1, "http": {"port": 8000}}
    recipe = load_recipe(RECIPE, environment={"CODE_JUDGE_PORT": "8001"})
    assert recipe.envgateway is not None and recipe.envgateway.http.port == 8001
    with pytest.raises(ConfigError, match="CODE_JUDGE_PORT is 'http'"):
        port_variables({"CODE_JUDGE_PORT": "http"})
