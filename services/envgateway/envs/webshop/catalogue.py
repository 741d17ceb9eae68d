"""Products, read from files in WebShop's raw form.

``items_shuffle*.json`` has the products, ``items_ins_v2*.json`` their attributes, ``items_human_ins.json`` the shopping
instructions. Products are taken, cleaned and priced by WebShop's rules.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from services.common.errors import ConfigError, DatasetError

_LONGEST_ID = 10
_NO_PRICE = 100.0
_NO_ATTRIBUTES = ("DUMMY_ATTR",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    id: str
    title: str
    query: str
    category: str
    product_category: str  # "Beauty › Hair Care › Shampoo"
    description: str
    bullet_points: tuple[str, ...]
    attributes: tuple[str, ...]
    options: Mapping[str, tuple[str, ...]]  # {"color": ("white", "wine red")}
    prices: tuple[float, ...]  # one, or the ends of a range, in dollars

    @property
    def price_tag(self) -> str:
        return " to ".join(f"${price}" for price in self.prices)


@dataclass(frozen=True, slots=True, kw_only=True)
class Instruction:
    """A user's wish, before a price limit is drawn."""

    product: Product
    text: str
    attributes: tuple[str, ...]
    options: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CatalogueFiles:
    products: Path
    attributes: Path
    instructions: Path


@dataclass(frozen=True, slots=True)
class Catalogue:
    products: Mapping[str, Product]  # by id, in the order of the file
    instructions: tuple[Instruction, ...]


def find_files(folder: Path) -> CatalogueFiles:
    """Raises ``ConfigError`` when a file is missing, or when several files match."""
    if not folder.is_dir():
        raise ConfigError(f"envgateway.webshop.data: there is no folder {folder.absolute()}")
    return CatalogueFiles(
        _one(folder, "items_shuffle"), _one(folder, "items_ins_v2"), _one(folder, "items_human_ins", exactly=True)
    )


def read_catalogue(files: CatalogueFiles, num_products: int | None = None) -> Catalogue:
    """Raises ``DatasetError`` with the file and the row."""
    attributes = _json(files.attributes, dict)
    instructions = _json(files.instructions, dict)
    products: dict[str, Product] = {}
    for number, row in enumerate(_json(files.products, list)[:num_products]):
        try:
            if row["asin"] != "nan" and len(row["asin"]) <= _LONGEST_ID and row["asin"] not in products:
                products[row["asin"]] = product_of(row, attributes.get(row["asin"], {}))
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            raise DatasetError(f"{files.products}: product {number}: {type(error).__name__}: {error}") from error
    asked = [_instructions(product, instructions, files.instructions) for product in products.values()]
    return Catalogue(products, tuple(one for several in asked for one in several))


def product_of(row: Mapping[str, Any], more: Mapping[str, Any]) -> Product:
    """One product of the raw file; ``more`` is its entry in the file of attributes."""
    bullet_points = row["small_description"]
    if not isinstance(bullet_points, list):
        bullet_points = [bullet_points]
    return Product(
        id=row["asin"],
        title=row["name"],
        query=row["query"].lower().strip(),
        category=row["category"],
        product_category=row["product_category"],
        description=row["full_description"] or "",
        bullet_points=tuple(point for point in bullet_points if point is not None),
        attributes=tuple(more.get("attributes", _NO_ATTRIBUTES)),
        options=_options(row.get("customization_options") or {}),
        prices=_prices(row.get("pricing") or ""),
    )


def draw_prices(products: Iterable[Product], draw: random.Random) -> dict[str, float]:
    """The cost of each product: its price, or a draw from its range."""
    return {p.id: p.prices[0] if len(p.prices) == 1 else draw.uniform(*p.prices) for p in products}


def _options(raw: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    return {
        name.lower(): tuple(content["value"].strip().replace("/", " | ").lower() for content in contents)
        for name, contents in raw.items()
        if contents is not None
    }


def _prices(raw: str) -> tuple[float, ...]:
    prices = tuple(float(re.sub(r"[^\d.]", "", part)) for part in raw.split("$")[1:3])
    return prices or (_NO_PRICE,)


def _instructions(product: Product, by_id: Mapping[str, Any], path: Path) -> list[Instruction]:
    try:
        return [
            Instruction(
                product=product,
                text=row["instruction"],
                attributes=tuple(row["instruction_attributes"]),
                options=tuple(row["instruction_options"]),
            )
            for row in by_id.get(product.id, ())
            if row["instruction_attributes"]
        ]
    except (KeyError, TypeError) as error:
        raise DatasetError(f"{path}: product {product.id}: {type(error).__name__}: {error}") from error


def _one(folder: Path, name: str, *, exactly: bool = False) -> Path:
    plain = folder / f"{name}.json"
    if plain.is_file():
        return plain
    found = [] if exactly else sorted(folder.glob(f"{name}*.json"))
    if len(found) == 1:
        return found[0]
    wanted = plain.name if exactly else f"{name}*.json"
    why = f"has no {wanted}" if not found else f"has several of {wanted} and no {plain.name}"
    raise ConfigError(f"envgateway.webshop.data: {folder} {why}")


def _json(path: Path, kind: type) -> Any:
    try:
        value = orjson.loads(path.read_bytes())
    except (OSError, orjson.JSONDecodeError) as error:
        raise DatasetError(f"{path}: {error}") from error
    if not isinstance(value, kind):
        raise DatasetError(f"{path}: this is no JSON {'object' if kind is dict else 'array'}")
    return value
