"""A recipe's GPU numbers count among those that CUDA_VISIBLE_DEVICES shows; the variable of a job scheduler stays in force."""

from __future__ import annotations

import pytest

from services.common.errors import ConfigError
from services.common.system.devices import VARIABLE, inside, mapped_gpus, visible_gpus


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("0,1", ["0", "1"]),
        (" 6 , 7 ", ["6", "7"]),
        ("GPU-4f1a,MIG-9b", ["GPU-4f1a", "MIG-9b"]),
        ("", []),
        ("-1", []),
        ("2,-1,3", ["2"]),
        ("NoDevFiles", ["NoDevFiles"]),
    ],
)
def test_the_variable_is_read_as_cuda_reads_it(value: str, shown: list[str]) -> None:
    assert visible_gpus({VARIABLE: value}) == shown


def test_without_the_variable_numbers_are_those_of_the_machine() -> None:
    assert visible_gpus({}) is None
    assert mapped_gpus([4, 6], {}, "x") == ["4", "6"]
    assert inside({"PATH": "/bin"}, {VARIABLE: "4,6"}, "x") == {"PATH": "/bin", VARIABLE: "4,6"}


def test_a_process_gets_its_share_of_what_the_environment_shows() -> None:
    made = inside({VARIABLE: "4,GPU-77,6,7"}, {VARIABLE: "1,3", "OMP_NUM_THREADS": "1"}, "trainer-model0")
    assert made == {VARIABLE: "GPU-77,7", "OMP_NUM_THREADS": "1"}


def test_a_process_without_gpus_of_its_own_sees_what_the_environment_shows() -> None:
    assert inside({VARIABLE: "4,5"}, {"A": "b"}, "x")[VARIABLE] == "4,5"


@pytest.mark.parametrize(("outer", "told"), [("4,5", "shows 2 GPUs"), ("", "write no GPU"), ("-1", "shows 0 GPUs")])
def test_a_number_beyond_what_is_shown_is_refused_with_the_numbers_to_write(outer: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told) as caught:
        inside({VARIABLE: outer}, {VARIABLE: "2"}, "inference-a")
    assert "inference-a takes GPU 2" in caught.value.message and "unset the variable" in caught.value.message
