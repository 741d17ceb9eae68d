"""Makes a small catalogue of invented products in WebShop's raw form, for machines without the real catalogue."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_BRANDS = ("Alder", "Brisk", "Cobalt", "Dovetail", "Ember", "Fathom")
_KINDS = (
    ("Water Bottle", "home", ("Home & Kitchen", "Dining", "Bottles"), ("leak proof", "stainless steel")),
    ("Desk Lamp", "garden", ("Tools & Home", "Lighting", "Desk Lamps"), ("energy efficient", "usb charging")),
    ("Running Shoes", "fashion", ("Clothing & Shoes", "Shoes", "Running"), ("non slip", "quick drying")),
    ("Wireless Speaker", "electronics", ("Electronics", "Audio", "Speakers"), ("fast charging", "water resistant")),
)
_COLORS = ("black", "blue", "red", "white")


@dataclass(frozen=True, slots=True)
class _Product:
    asin: str
    name: str
    kind: int
    attribute: str
    price: float


def write_catalogue(folder: Path, num_products: int, seed: int) -> int:
    """Write products, their attributes and one shopping instruction for each; returns the number of instructions."""
    folder.mkdir(parents=True, exist_ok=True)
    products = list(_draw(num_products, seed))
    items, attributes, instructions = [], {}, {}
    for product in products:
        noun, category, path, _ = _KINDS[product.kind]
        items.append(
            {
                "asin": product.asin,
                "name": product.name,
                "category": category,
                "query": noun.lower(),
                "product_category": " › ".join(path),
                "full_description": f"A {noun.lower()} that is {product.attribute}.",
                "small_description": [product.attribute, f"{noun.lower()} for every day"],
                "pricing": f"${product.price:.2f}",
                "customization_options": {"Color": [{"value": color, "image": None} for color in _COLORS]},
                "images": ["none"],
            }
        )
        attributes[product.asin] = {"attributes": [product.attribute]}
        instructions[product.asin] = [
            {
                "asin": product.asin,
                "instruction": f"i am looking for a {noun.lower()} that is {product.attribute}.",
                "instruction_attributes": [product.attribute],
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


def _draw(count: int, seed: int) -> Iterator[_Product]:
    draw = random.Random(seed)
    for number in range(count):
        kind = number % len(_KINDS)
        noun, _, _, words = _KINDS[kind]
        attribute = draw.choice(words)
        yield _Product(
            asin=f"B{number:09}",
            name=f"{draw.choice(_BRANDS)} {attribute.title()} {noun}, No. {number}",
            kind=kind,
            attribute=attribute,
            price=draw.randrange(500, 15_000) / 100,
        )
