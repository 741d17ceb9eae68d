"""Long conversations are cut from their middle."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from extras.worlds.taskserver import Message, cut, num_pieces


def _messages(sizes: list[int]) -> list[Message]:
    """Alternating, beginning and ending with the user."""
    return [{"role": ("user", "agent")[n % 2], "content": "!" * size} for n, size in enumerate(sizes)]


def test_pieces_are_counted_as_agentbench_counts_them() -> None:
    assert [num_pieces(text, most=100) for text in ("", "a", "abcdefg", "abcdefgh", "a b\nc", "a1,  2")] == [
        0,
        1,
        1,
        2,
        3,
        4,
    ]


def test_a_short_history_is_whole() -> None:
    messages = _messages([3, 3, 3])
    assert cut(messages, 10) == messages


def test_a_long_history_loses_its_middle_and_names_the_gap() -> None:
    messages = _messages([1, 2, 3, 4, 5])
    shown = cut(messages, 11)  # 1 + 5 + 4 is less than 11, with 3 it is not
    assert shown == [{"role": "user", "content": "!\n\n[NOTICE] 2 messages are omitted."}, *messages[3:]]
    assert [m["content"] for m in cut(messages, 3)] == ["!\n\n[NOTICE] 4 messages are omitted."]


@given(st.lists(st.integers(0, 40), min_size=1, max_size=15).filter(lambda sizes: len(sizes) % 2), st.integers(1, 200))
def test_roles_alternate_and_no_message_is_shown_twice(sizes: list[int], most: int) -> None:
    messages = _messages(sizes)
    shown = cut(messages, most)
    assert [m["role"] for m in shown] == [("user", "agent")[n % 2] for n in range(len(shown))]
    assert shown[1:] == messages[len(messages) - len(shown) + 1 :]
    assert len(shown) == 1 or sum(num_pieces(m["content"], most) for m in [messages[0], *shown[1:]]) < most
