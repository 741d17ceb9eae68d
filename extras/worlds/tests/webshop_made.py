"""A made catalogue of a few products, in WebShop's raw form."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def product(name: str, **changes: Any) -> dict[str, Any]:
    return {
        "asin": "",
        "name": name,
        "category": "garden",
        "query": " Mugs ",
        "product_category": "Home › Kitchen › Mugs",
        "full_description": "For tea.",
        "small_description": ["dishwasher safe"],
        "pricing": "$10.00",
        "customization_options": {},
        **changes,
    }


PRODUCTS = [
    product(
        "Acme Stone Mug",
        asin="B00000000A",
        customization_options={
            "Color": [{"value": " Navy Blue "}, {"value": "Red/White"}],
            "Size": [{"value": "large"}, {"value": "description"}],
            "Nothing": None,
        },
    ),
    product("Acme Glass Mug", asin="B00000000B", pricing="$12.50$20.00", small_description="one text"),
    product("Halden Lamp", asin="B00000000C", query="lamp", product_category="Home › Light", pricing=""),
    product("Twice", asin="B00000000A"),
    product("An id too long", asin="B00000000ABC"),
    product("No id", asin="nan"),
    *(product(f"Plain cup {n}", asin=f"C{n:09d}", full_description="Cup.") for n in range(12)),
]
ATTRIBUTES = {"B00000000A": {"attributes": ["hand made", "lead free"]}, "B00000000C": {"attributes": ["warm light"]}}
INSTRUCTIONS = {
    "B00000000A": [
        {
            "instruction": "i want a hand made mug in navy.",
            "instruction_attributes": ["hand made"],
            "instruction_options": ["navy"],
        },
        {"instruction": "whatever", "instruction_attributes": [], "instruction_options": []},
    ],
    "B00000000B": [
        {"instruction": "a glass mug", "instruction_attributes": ["glass"], "instruction_options": []},
    ],
    "unknown": [{"instruction": "x", "instruction_attributes": ["y"], "instruction_options": []}],
}
GOAL = {
    "asin": "B00000000A",
    "name": "Acme Stone Mug",
    "query": "mugs",
    "product_category": "Home › Kitchen › Mugs",
    "instruction_text": "i want a hand made mug in blue, and price lower than 20.00 dollars",
    "attributes": ["hand made"],
    "goal_options": ["blue"],
    "price_upper": 20.0,
}


def write_catalogue(folder: Path) -> Path:
    (folder / "items_shuffle_20.json").write_text(json.dumps(PRODUCTS))
    (folder / "items_ins_v2_20.json").write_text(json.dumps(ATTRIBUTES))
    (folder / "items_human_ins.json").write_text(json.dumps(INSTRUCTIONS))
    return folder
