"""How windows follow load, and where requests go."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.inference.engine.served.fleet import PrefixMap, Window, choose


def test_a_queue_that_stays_shrinks_the_window_to_what_runs() -> None:
    window = Window.open(512)
    window.observe(in_flight=512, running=40, waiting=472, used_share=0.99)
    assert window.size == 512  # one look: a burst of prompts waits for its turn too
    window.observe(in_flight=512, running=40, waiting=472, used_share=0.99)
    assert window.size == 44


def test_a_window_that_is_used_up_without_a_queue_grows_to_its_ceiling() -> None:
    window = Window(ceiling=100, size=40)
    sizes = []
    for _ in range(20):
        window.observe(in_flight=window.size, running=window.size, waiting=0, used_share=0.5)
        sizes.append(window.size)
    assert sizes[0] == 45 and sizes[-1] == 100
    assert sizes == sorted(sizes)


def test_a_window_does_not_grow_while_it_is_not_used_or_the_cache_is_full() -> None:
    window = Window(ceiling=100, size=40)
    window.observe(in_flight=20, running=20, waiting=0, used_share=0.5)
    window.observe(in_flight=40, running=40, waiting=0, used_share=0.97)
    assert window.size == 40


@given(st.lists(st.tuples(st.integers(0, 600), st.integers(0, 600), st.integers(0, 600), st.floats(0, 1))))
def test_a_window_stays_between_one_and_its_ceiling(looks: list[tuple[int, int, int, float]]) -> None:
    window = Window.open(256)
    for in_flight, running, waiting, used in looks:
        window.observe(in_flight=in_flight, running=running, waiting=waiting, used_share=used)
        assert 1 <= window.size <= 256


def test_requests_go_to_the_least_loaded_server() -> None:
    assert choose({0: (7, 8), 1: (3, 8), 2: (5, 32)}, None) == 2


def test_what_begins_alike_goes_where_it_is_cached_unless_that_one_is_busier() -> None:
    assert choose({0: (6, 64), 1: (0, 64)}, 0) == 0
    assert choose({0: (40, 64), 1: (0, 64)}, 0) == 1
    assert choose({0: (7, 8), 1: (0, 8)}, 0) == 1


def test_a_conversation_is_found_by_its_longest_known_beginning() -> None:
    prefixes = PrefixMap()
    first = list(range(200))
    prefixes.note(first, 0)
    prefixes.note([*range(64), *range(500, 700)], 1)
    assert prefixes.find([*first, *range(900, 990)]) == 0
    assert prefixes.find([*range(64), *range(500, 900)]) == 1
    assert prefixes.find(list(range(1000, 1200))) is None
    prefixes.forget(0)
    assert prefixes.find([*first, 7]) == 1  # only the first block is known


def test_short_prompts_are_known_by_themselves() -> None:
    prefixes = PrefixMap()
    prefixes.note([1, 2, 3], 2)
    assert prefixes.find([1, 2, 3]) == 2
    assert prefixes.find([1, 2, 4]) is None
