"""``rollmill page``: the index, the texts of tokens, and the answers of its server to good, damaged and foreign runs."""

from __future__ import annotations

import base64
import shutil
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from typer.testing import CliRunner

from benchmarks._page_run import HOSTILE, write_run
from extras.page import index
from extras.page.index import FAILED, TRAINED
from extras.page.reader import token_texts
from extras.page.server import POLICY, PageServer, check_runs, keys_to_serve
from services.cli.__main__ import app
from services.cli.inspect.trajectories import Ids
from services.common.errors import ConfigError
from services.common.security import identity
from services.common.security.keys import Role
from tests.keys import as_role, make_keys
from tests.unit.inference.fakes import qwen_like_tokenizer
from tests.waiting import accepted

Ask = Callable[..., Any]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of 160 rollouts whose texts are hostile."""
    folder = tmp_path_factory.mktemp("page")
    qwen_like_tokenizer().save_pretrained(folder / "tokenizer")
    write_run(folder / "one", 160, folder / "tokenizer", hostile=True)
    return folder


@asynccontextmanager
async def visiting(server: PageServer, authority: Path | None = None) -> AsyncIterator[aiohttp.ClientSession]:
    """A session with a server that listens; over TLS where an authority is named."""
    port = await server.start()
    trusted = authority and aiohttp.TCPConnector(ssl=ssl.create_default_context(cafile=str(authority)))
    try:
        async with aiohttp.ClientSession(
            f"http{'s' if trusted else ''}://127.0.0.1:{port}", connector=trusted
        ) as session:
            yield session
    finally:
        await server.stop()


@asynccontextmanager
async def serving(*run_dirs: Path) -> AsyncIterator[Ask]:
    """``ask(path)``: status and JSON of a server of these runs."""
    async with visiting(PageServer(run_dirs, "127.0.0.1", 0)) as session:

        async def ask(path: str, **query: str | int) -> tuple[int, Any]:
            async with session.get(f"/api/{path}", params=query) as answer:
                return answer.status, await answer.json()

        yield ask


async def complete(ask: Ask, run: int = 0) -> dict[str, Any]:
    """The facets of a run whose journal is read, with texts."""
    found: dict[str, Any] = {}

    async def is_read() -> bool:
        found.update((await ask(f"runs/{run}/facets"))[1])
        return bool(found["complete"] and found["texts_searched"])

    await holds(is_read)
    return found


async def holds(condition: Callable[[], Awaitable[bool]]) -> None:
    """Waits until an awaited condition is true."""

    async def look() -> None:
        assert await condition()

    await accepted(look, AssertionError)


# --- what the server answers -----------------------------------------------------------------------------------------


async def test_rollouts_are_found_by_words_task_step_reward_length_and_fate(runs: Path) -> None:
    async with serving(runs / "one") as ask:
        facets = await complete(ask)
        assert facets["indexed"] == 160 and facets["unreadable"] == 0
        assert facets["fates"][FAILED] == 3 and facets["fates"][TRAINED] > 100

        async def total(**query: str | int) -> int:
            status, found = await ask("runs/0/rollouts", **query)
            assert status == 200 and len(found["rows"]) == min(found["total"], 100)
            return int(found["total"])

        assert await total() == 160
        assert await total(task="mill-0003*") == 8 and await total(task="mill-000[3") == 0
        trained = await total(step=1)
        assert trained == facets["fates"][TRAINED]
        assert await total(min_reward=1) + await total(max_reward=0) + 3 == 160
        assert await total(min_tokens=1) == 157
        assert await total(words="grinds sacks") == 157 and await total(words="grinds nothing") == 0
        assert await total(words='" OR *') == 0 and await total(words="timeout") == 3
        assert await total(words="question 7") >= 8, "the row of the task"
        assert await total(task_group="page-000003", fate=TRAINED) in (0, 8)
        lengths = [row["tokens"] for row in (await ask("runs/0/rollouts", order="-tokens"))[1]["rows"]]
        assert lengths == sorted(lengths)


async def test_a_search_stops_at_a_bound_and_says_so(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index, "MOST_FOUND", 120)
    async with serving(runs / "one") as ask:
        await complete(ask)

        async def found(**query: str | int) -> tuple[int, bool, list[int]]:
            answer = (await ask("runs/0/rollouts", **query))[1]
            return answer["total"], answer["more"], [row["number"] for row in answer["rows"]]

        for words in ("sacks", "question"):  # of answers, and of the rows of all tasks
            for order in ("newest", "oldest"):
                total, more, numbers = await found(words=words, order=order)
                assert (total, more) == (120, True)
                assert numbers == sorted(numbers, reverse=order == "newest")
        assert (await found(words="timeout"))[:2] == (3, False)
        assert len((await found(words="sacks", offset=100))[2]) >= 20, "the rows up to the bound"


async def test_a_conversation_has_roles_tools_expectation_and_every_token(runs: Path) -> None:
    async with serving(runs / "one") as ask:
        await complete(ask)
        row = next(row for row in (await ask("runs/0/rollouts", step=1))[1]["rows"] if row["reward"] == 1.0)
        _, found = await ask(f"runs/0/rollouts/{row['number']}")
        assert found["expected"] == str(int(found["task_id"][5:9]))
        assert len(found["siblings"]) == 8
        (sequence,) = found["sequences"]
        assert [turn["role"] for turn in sequence["turns"]] == ["system", "user", "policy", "tool", "policy"]
        assert HOSTILE in sequence["turns"][1]["text"], "text is sent as it is: the page makes text of it"
        call, answer = sequence["turns"][2], sequence["turns"][4]
        assert '<tool_call>{"name": "multiply"' in "".join(call["tokens"])
        assert "é漢🌾.<|im_end|>" in "".join(answer["tokens"])
        for turn in (call, answer):
            length = len(turn["tokens"])
            assert length == len(turn["logprobs"]) == len(turn["ids"]) == sum(s["tokens"] for s in turn["spans"])
            assert {span["version"] for span in turn["spans"]} == {0}
        use = sequence["use"]
        assert use["step"] == 1
        assert use["advantage"] == pytest.approx((1.0 - use["group_mean"]) / (use["group_std"] + 1e-5))


async def test_state_curves_fates_weights_and_events_come_from_files_alone(runs: Path) -> None:
    async with serving(runs / "one") as ask:
        await complete(ask)
        await holds(lambda: _is_there(ask, "runs/0/fates", "fates"))
        state = (await ask("runs/0/state"))[1]["state"]
        assert state["state"] == "interrupted" and not state["is_live"]
        assert [one["cause"] for one in state["now"]["stalls"]] == ["no slots"]
        assert {bar["component"] for bar in state["time"]} == {f"replica/a{HOSTILE}", "trainer/model0"}
        titles = {panel["title"] for panel in (await ask("curves", runs="0"))[1]["panels"] if panel["lines"]}
        assert {"reward by step", "loss", "entropy", "gradient norm", "throughput"} <= titles
        fates = (await ask("runs/0/fates"))[1]["fates"]["policies"]["model0"]["total"]
        assert fates["issued"]["rollouts"] == 160
        assert (await ask("runs/0/weights"))[1]["total"] == 1
        kinds = [event["kind"] for event in (await ask("runs/0/events"))[1]["events"]]
        assert sorted(set(kinds)) == ["evaluation", "stall"] and kinds.count("stall") == 2


async def _is_there(ask: Ask, path: str, key: str) -> bool:
    return (await ask(path))[1][key] is not None


@pytest.mark.parametrize(
    ("path", "status", "told"),
    [
        ("runs/7/state", 404, "there is no run 7"),
        ("runs/x/state", 400, "the run is 'x': write a number"),
        ("runs/0/secrets", 404, "there is no 'secrets'"),
        ("runs/0/rollouts/999999", 404, "there is no rollout with the number 999999"),
        ("runs/0/rollouts/99999999999999999999", 400, "write a smaller number"),
        (f"runs/0/rollouts?step={'9' * 400}", 400, "write a smaller number"),
        ("runs/0/rollouts?step=two", 400, "step is 'two': write a number"),
        ("runs/0/rollouts?min_reward=nan", 400, "write a smaller number"),
        ("runs/0/rollouts?order=;drop", 400, "order is ';drop': write one of newest"),
    ],
)
async def test_a_question_that_makes_no_sense_is_told_why(runs: Path, path: str, status: int, told: str) -> None:
    async with serving(runs / "one") as ask:
        found, answer = await ask(path)
        assert found == status and told in answer["detail"]


async def test_files_of_the_page_come_with_a_policy_and_nothing_else_is_served(runs: Path) -> None:
    async with visiting(PageServer([runs / "one"], "127.0.0.1", 0)) as session:
        async with session.get("/") as answer:
            assert answer.status == 200 and answer.headers["Content-Security-Policy"] == POLICY
            assert "http" not in (await answer.text()).replace("<!doctype html>", ""), "no other host"
        for path in ("/assets/..%2fserver.py", "/assets/server.py", "/assets/.", "/assets/nothing.js"):
            assert (await session.get(path)).status == 404
        assert (await session.get("/", headers={"Origin": "http://evil.test"})).status == 403
        assert (await session.post("/api/runs", json={})).status == 405


# --- damaged, foreign and growing runs -------------------------------------------------------------------------------


async def test_a_damaged_run_shows_what_is_whole_and_names_the_rest(runs: Path, tmp_path: Path) -> None:
    damaged, foreign, empty = tmp_path / "damaged", tmp_path / "foreign", tmp_path / "empty"
    for path in (damaged, foreign):
        shutil.copytree(runs / "one", path)
    with (damaged / "metrics" / "orchestrator.jsonl").open("ab") as file:
        file.write(b'{"kind": "training_step"}\n[1]\n\xff\xfe\n{"kind": 3, "time": "x"}\n{"time": 1.0, "kind"')
    (segment,) = (damaged / "journal").glob("trajectories-*")
    content = bytearray(segment.read_bytes())
    content[len(content) // 2 : len(content) // 2 + 40] = b"x" * 40
    segment.write_bytes(content)
    (foreign / "recipe.json").write_text('{"name": "of another program"}')
    empty.mkdir()
    shutil.copy(runs / "one" / "recipe.json", empty)
    async with serving(damaged, foreign, empty) as ask:
        facets = await complete(ask)
        assert 150 < facets["indexed"] < 160 or facets["unreadable"]
        state = (await ask("runs/0/state"))[1]["state"]
        assert state["skipped_rows"] == 4
        for subject in ("state", "fates", "events", "weights", "facets", "rollouts"):
            assert (await ask(f"runs/1/{subject}"))[0] == (await ask(f"runs/2/{subject}"))[0] == 200
        await holds(lambda: _problem(ask, 1, "recipe.json cannot run"))
        await holds(lambda: _problem(ask, 2, "has no journal yet: its orchestrator has not begun"))


async def _problem(ask: Ask, run: int, told: str) -> bool:
    problems = (await ask(f"runs/{run}/state"))[1]["problems"]
    return any(told in problem and "Traceback" not in problem for problem in problems.values())


def test_a_directory_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no directory"):
        check_runs([tmp_path / "nothing"])
    told = CliRunner().invoke(app, ["page", str(tmp_path)])
    assert isinstance(told.exception, ConfigError) and "is no run directory" in told.exception.message


def test_only_loopback_is_served_without_keys(runs: Path) -> None:
    assert keys_to_serve(runs / "one", "127.0.0.1") is None
    with pytest.raises(ConfigError, match=r"may not listen on 0\.0\.0\.0 without keys"):
        keys_to_serve(runs / "one", "0.0.0.0")


async def test_with_keys_a_browser_logs_in_with_the_token_of_a_viewer(runs: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "keyed"
    shutil.copytree(runs / "one", run_dir)
    ring = make_keys(run_dir / "keys", "one")
    who = keys_to_serve(run_dir, "0.0.0.0")
    assert who is not None and who.role is Role.ORCHESTRATOR
    with identity.used(who):
        server = PageServer([run_dir], "127.0.0.1", 0)
    async with visiting(server, run_dir / "keys" / "ca.pem") as session:

        async def status(shown: str) -> int:
            answer = await session.get("/", headers={"Authorization": shown} if shown else {})
            assert answer.status != 401 or answer.headers["WWW-Authenticate"].startswith("Basic realm=")
            return answer.status

        def basic(name: str, password: str) -> str:
            return f"Basic {base64.b64encode(f'{name}:{password}'.encode()).decode()}"

        viewer, agent = (as_role(ring, role).bundle.token for role in (Role.VIEWER, Role.CLIENT))
        assert await status(basic("anyone", viewer)) == 200
        assert await status(basic("anyone", agent)) == 403
        guesses = basic("viewer", "guess"), basic("viewer", f"{viewer}x"), "Basic", "Basic !!", "Basic dmlld2Vy"
        for shown in ("", *guesses, "Digest x", f"Basic {viewer}"):
            assert await status(shown) == 401


# --- parts -----------------------------------------------------------------------------------------------------------


def test_the_texts_of_tokens_add_up_to_the_text() -> None:
    tokenizer = qwen_like_tokenizer()
    for text in ("plain words", "é漢🌾 and 👩‍🌾", "<|im_start|>user\nA<|im_end|>", "", "\n\n\t"):
        ids = tokenizer.encode(text, add_special_tokens=False)
        found = token_texts(tokenizer, ids)
        assert "".join(found) == text and len(found) == len(ids)
    half = tokenizer.encode("漢", add_special_tokens=False)[:1]
    assert len(token_texts(tokenizer, half * 3)) == 3, "bytes that are no character have a place each"
    assert token_texts(Ids(), [7, 8]) == ["[7] ", "[8] "]
