"""A data source: a generator of rows. Its arguments are ``seed`` and the settings of the recipe.

data: {train: {generator: "dataset:sums", settings: {most: 20, count: 64}, id_field: id}}
"""

import random
from collections.abc import Iterator


def sums(seed: int, most: int = 100, count: int = 1000) -> Iterator[dict[str, str]]:
    """Rows with a question and its answer."""
    draw = random.Random(seed)
    for number in range(count):
        left, right = draw.randint(1, most), draw.randint(1, most)
        yield {"id": str(number), "question": f"What is {left} + {right}?", "answer": str(left + right)}


def numbers(seed: int, count: int = 1000) -> Iterator[dict[str, str]]:
    """Rows for an environment that needs none: each seeds an episode of its own."""
    for number in range(count):
        yield {"id": str(number)}
