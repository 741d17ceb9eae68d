"""Stop texts, and text that grows by tokens."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.common.kept_tokens import left_out_row, pack, unpack
from services.common.records import Segment
from services.inference.engine.base import FinishReason, Generation
from services.inference.workflows.agents import StopWatch, settled
from tests.unit.inference.fakes import qwen_like_chat


def said(ids: list[int], cut: int) -> Generation:
    """Ids of two versions, cut anywhere."""
    parts = [(ids[:cut], 3), (ids[cut:], 4)]
    return Generation(
        segments=tuple(
            Segment.policy(
                part,
                [-0.1 * (i + 1) for i in range(len(part))],
                version,
                kept=pack([left_out_row([token + 1]) for token in part], len(part)),
            )
            for part, version in parts
            if part
        ),
        finish_reason=FinishReason.LENGTH,
    )


@given(
    text=st.text(max_size=40), stop=st.text(min_size=1, max_size=3), told=st.integers(0, 200), cut=st.integers(0, 40)
)
def test_a_generation_ends_with_the_token_that_completes_a_stop(text: str, stop: str, told: int, cut: int) -> None:
    """For any number of tokens that the engine reported before its end."""
    chat = qwen_like_chat()
    ids = list(chat.encode(text))
    watch = StopWatch(chat, [stop])
    for token in ids[:told]:
        if watch.on_sampled(token):
            break
    whole = said(ids, min(cut, len(ids)))
    kept = watch.finish(whole)
    tokens = kept.token_ids
    assert tokens == ids[: len(tokens)]
    if stop in chat.decode(ids):
        assert kept.finish_reason is FinishReason.STOP
        assert stop in chat.decode(tokens) and stop not in chat.decode(tokens[:-1])
        assert watch.stop_in(chat.decode(tokens)) == stop
    else:
        assert kept is whole
    wanted, got = ([(s.weight_version, float(p)) for s in g.segments for p in s.logprobs] for g in (whole, kept))
    assert got == wanted[: len(got)] and len(got) == len(tokens)
    sets = [unpack(s.kept, s.token_ids) for s in kept.segments]
    assert [int(i) for s in sets for i in s.ids] == [token + 1 for token in tokens]


@given(text=st.text("ab<", max_size=20), ending=st.text("ab<", min_size=1, max_size=4), more=st.text("ab<", max_size=9))
def test_settled_text_stays_whatever_comes(text: str, ending: str, more: str) -> None:
    now = settled(text, [ending])
    assert ending not in now
    assert (text + more).partition(ending)[0].startswith(now)
