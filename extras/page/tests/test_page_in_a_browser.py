"""``rollmill page`` in a real browser: every view, by keyboard, on a phone's width, with text that would run if it could."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from benchmarks._page_run import HOSTILE, write_run
from extras.page.server import PageServer
from tests.chromium import Page, browser
from tests.unit.inference.fakes import qwen_like_tokenizer

VIEWS = {"now": ".ring", "curves": "figure path.line", "rollouts": ".results a", "fates": ".column", "weights": "td", "events": ".event"}  # fmt: skip

# Of the stage that runs one test after another: beside others the browser misses its deadlines.
pytestmark = [pytest.mark.recipes, pytest.mark.needs("chromium")]


@asynccontextmanager
async def opened(tmp_path: Path) -> AsyncIterator[tuple[Page, str]]:
    """A browser, and the address of a page with a hostile run and one of another seed."""
    qwen_like_tokenizer().save_pretrained(tmp_path / "tokenizer")
    write_run(tmp_path / "one", 640, tmp_path / "tokenizer", hostile=True)
    write_run(tmp_path / "two", 640, tmp_path / "tokenizer", seed=8)
    server = PageServer([tmp_path / "one", tmp_path / "two"], "127.0.0.1", 0)
    port = await server.start()
    try:
        async with browser() as page:
            yield page, f"http://127.0.0.1:{port}/"
    finally:
        await server.stop()


async def test_a_person_reads_a_run_and_nothing_of_it_runs(tmp_path: Path) -> None:
    async with opened(tmp_path) as (page, address):
        await every_view_shows_in_both_schemes_and_on_a_phone(page, address)
        await a_conversation_is_read_by_keyboard(page, address)
        await filters_find_and_the_address_keeps_them(page, address)
        assert await page.run("window.hacked ?? null") is None
        assert await page.run("document.querySelectorAll('main script, main [onerror], main [onload]').length") == 0
        assert page.errors == []
        assert {url.split("/")[2] for url in page.requests if "://" in url} == {address.split("/")[2]}, "no other host"


async def every_view_shows_in_both_schemes_and_on_a_phone(page: Page, address: str) -> None:
    grounds = set()
    for scheme, width in (("light", 1280), ("dark", 390)):
        await page.scheme(scheme)
        await page.size(width, 844, phone=width < 500)
        for number, (view, shown) in enumerate(VIEWS.items(), start=1):
            if number == 1:
                await page.open(address)
            else:
                await page.key(str(number))
            await page.until(f"document.querySelector('.view.{view} {shown}')")
            assert await page.run("document.documentElement.scrollWidth") <= width, f"{view} fits {width} px"
        grounds.add(await page.run("getComputedStyle(document.body).backgroundColor"))
    assert len(grounds) == 2
    before = await page.run("getComputedStyle(document.body).backgroundColor")
    await page.key("d")
    await page.until(f"getComputedStyle(document.body).backgroundColor !== {before!r}")
    await page.run("localStorage.clear(); delete document.documentElement.dataset.theme")
    await page.size(1280, 900)


async def a_conversation_is_read_by_keyboard(page: Page, address: str) -> None:
    await page.open(f"{address}#/rollouts?fate=in_a_batch")
    # The whole list: while the journal is read, newer rollouts come in above.
    await page.until("document.querySelector('.count')?.textContent.endsWith(' of 640 rollouts')")
    await page.until("document.querySelector('.results a')")
    await page.key("j")
    await page.until("document.querySelector('.turn.policy .tokens span')")
    first = await page.run("location.hash")
    await page.key("j")
    await page.until(f"location.hash !== {first!r} && document.querySelector('.turn.policy .tokens span')")
    await page.key("k")
    await page.until(f"location.hash === {first!r}")
    await page.until("document.querySelector('.turn.user')?.textContent.includes('<img src=x')")
    roles = await page.run("[...document.querySelectorAll('.turn')].map((turn) => turn.className.split(' ')[1])")
    assert roles == ["system", "user", "policy", "tool", "policy"]
    assert await page.run("[...document.querySelectorAll('.part')].map((part) => part.dataset.part)") == [
        "thinking",
        "tool call",
    ]
    await page.run("document.querySelector('.tokens').focus()")
    await page.key("ArrowRight")
    await page.key("ArrowRight")
    told = await page.until("document.querySelector('.told').textContent")
    for fact in ("id ", "log-probability -", "version ", "advantage "):
        assert fact in told, told
    await page.run(
        "document.querySelector('.tokens [data-n=\"5\"]').dispatchEvent(new PointerEvent('pointerover', {bubbles: true}))"
    )
    assert await page.run("document.querySelector('.tokens .here').dataset.n") == "5"
    await page.key("Escape")
    await page.until("!location.hash.includes('open=')")


async def filters_find_and_the_address_keeps_them(page: Page, address: str) -> None:
    await page.open(f"{address}#/rollouts")
    await page.until("document.querySelector('.count')?.textContent.startsWith('640 of 640')")
    await page.key("/")
    for letter in "timeout":
        await page.key(letter)
    await page.until("document.querySelector('.count').textContent.startsWith('10 of 640')")
    assert "words=timeout" in await page.run("location.hash")
    await page.until("document.querySelector('.results .pill').textContent === 'failed'")
    await page.open("about:blank")
    await page.open(f"{address}#/rollouts?step=2&min_reward=1")
    await page.until("/^[1-9]\\d* of 640/.test(document.querySelector('.count')?.textContent)")
    assert await page.run("document.querySelector('[name=step]').value") == "2"
    assert await page.run("[...document.querySelectorAll('.results .pill')].every((pill) => pill.textContent === '1')")
    assert HOSTILE in await page.run("document.querySelector('.results .task').textContent")
