"""Makes a small catalogue of invented products in WebShop's raw form, for machines without the real catalogue."""

from __future__ import annotations

import json
import random
from pathlib import Path

_BRANDS = ("Alder", "Brisk", "Cobalt", "Dovetail", "Ember", "Fathom")
_KINDS = (
    ("Water Bottle", "home", ("Home & Kitchen", "Dining", "Bottles"), ("leak proof", "stainless steel")),
    ("Desk Lamp", "garden", ("Tools & Home", "Lighting", "Desk Lamps"), ("energy efficient", "usb charging")),
    ("Running Shoes", "fashion", ("Clothing & Shoes", "Shoes", "Running"), ("non slip", "quick drying")),
    ("Wireless Speaker", "electronics", ("Electronics", "Audio", "Speakers"), ("fast charging", "water resistant")),
)
_COLORS = ("black", "blue", "red", "white")


def write_catalogue(folder: Path, num_products: int, seed: int) -> int:
    """Write products, their attributes and one shopping instruction for each; returns the number of instructions."""
    folder.mkdir(parents=True, exist_ok=True)
    draw = random.Random(seed)
    items, attributes, instructions = [], {}, {}
    for number in range(num_products):
        noun, category, path, words = _KINDS[number % len(_KINDS)]
        asin, attribute = f"B{number:09}", draw.choice(words)
        items.append(
            {
                "asin": asin,
                "name": f"{draw.choice(_BRANDS)} {attribute.title()} {noun}, No. {number}",
                "category": category,
                "query": noun.lower(),
                "product_category": " › ".join(path),
                "full_description": f"A {noun.lower()} that is {attribute}.",
                "small_description": [attribute, f"{noun.lower()} for every day"],
                "pricing": f"${draw.randrange(500, 15_000) / 100:.2f}",
                "customization_options": {"Color": [{"value": color, "image": None} for color in _COLORS]},
                "images": ["none"],
            }
        )
        attributes[asin] = {"attributes": [attribute]}
        instructions[asin] = [
            {
                "asin": asin,
                "instruction": f"i am looking for a {noun.lower()} that is {attribute}.",
                "instruction_attributes": [attribute],
                "instruction_options": [],
            }
        ]
    for name, content in (
        ("items_shuffle_1000.json", items),
        ("items_ins_v2_1000.json", attributes),
        ("items_human_ins.json", instructions),
    ):
        (folder / name).write_text(json.dumps(content), encoding="utf-8")
    return len(instructions)
