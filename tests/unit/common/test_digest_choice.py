"""Trainer and replicas take the same digest from the recipe."""

from __future__ import annotations

from typing import Any

import pytest

from services.common.config.loading import validate
from services.common.config.recipe import Recipe


def recipe(**sections: Any) -> Recipe:
    return validate(
        {
            "name": "r",
            "policies": {"model0": {"model": {"path": "./m"}}},
            "data": {"train": {"path": "tasks.jsonl"}},
            "evaluation": {"at_start": False, "at_end": False},
            **sections,
        },
        source="test",
    )


@pytest.mark.parametrize(
    ("sections", "chosen"),
    [
        ({}, "xxh3-128"),
        ({"orchestrator": {"host": "::1"}, "envgateway": None}, "xxh3-128"),
        ({"orchestrator": {"host": "0.0.0.0"}}, "blake3"),
        ({"inference": {"a": {}, "b": {"host": "10.0.0.7", "port": 0}}}, "blake3"),
        ({"envgateway": {"host": "gateway.example"}}, "blake3"),
    ],
)
def test_the_digest_withstands_forgery_where_others_reach_the_run(sections: dict[str, Any], chosen: str) -> None:
    assert recipe(**sections).digest_algorithm() == chosen
