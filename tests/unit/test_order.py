"""Files with slow tests come first, in the order of their length, and the order within a file stays."""

from __future__ import annotations

from pathlib import Path

from tests import order

TESTS = Path(__file__).resolve().parents[1]


def test_files_that_are_named_are_there_and_hold_slow_tests() -> None:
    texts = {file: (TESTS.parent / file).read_text() for file in order.LONGEST}
    assert [file for file, text in texts.items() if "pytest.mark.slow" not in text] == []
    assert len(set(order.LONGEST)) == len(order.LONGEST)
