"""Trainer and replicas take the same digest from the recipe."""

from __future__ import annotations

from typing import Any

import pytest

from services.common.config.loading import validate
from services.common.config.recipe import Recipe


def recipe(digest: str, **sections: Any) -> Recipe:
    return validate(
        {
            "name": "r",
            "policies": {"model0": {"model": {"path": "./m"}, "weights": {"digest": digest}}},
            "data": {"train": {"path": "tasks.jsonl"}},
            "evaluation": {"at_start": False, "at_end": False},
            **sections,
        },
        source="test",
    )


@pytest.mark.parametrize(
    ("digest", "sections", "chosen"),
    [
        ("auto", {}, "xxh3-128"),
        ("auto", {"orchestrator": {"host": "::1"}, "envgateway": None}, "xxh3-128"),
        ("auto", {"orchestrator": {"host": "0.0.0.0"}}, "blake3"),
        ("auto", {"inference": {"a": {}, "b": {"host": "10.0.0.7", "port": 0}}}, "blake3"),
        ("auto", {"envgateway": {"host": "gateway.example"}}, "blake3"),
        ("blake3", {}, "blake3"),
        ("xxh3-128", {"orchestrator": {"host": "0.0.0.0"}}, "xxh3-128"),
    ],
)
def test_the_digest_withstands_forgery_where_others_reach_the_run(
    digest: str, sections: dict[str, Any], chosen: str
) -> None:
    assert recipe(digest, **sections).digest_algorithm("model0") == chosen
