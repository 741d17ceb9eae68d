"""A small call for each behaviour that a recipe page tells, which fails where the page is false. By the row's key."""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from services.cli.check.recipe import missing_data
from services.cli.deploy.layout import lay_out
from services.common.records import Task
from services.common.text.programs import program_of
from services.envgateway.envs import alfworld as prompts
from services.envgateway.envs import webshop_pages
from services.envgateway.envs.webshop import SearchIndex, draw_prices, find_files, read_catalogue
from services.envgateway.judge.judge import Judge
from services.envgateway.judge.records import JudgeRequest, StdinCase, StdinTests
from services.envgateway.sandbox.pool import SandboxPool
from services.inference.engine.torch.slots import SamplingRows, sample
from services.inference.workflows.base import Episode, ReviewVerdict, read_verdict
from services.inference.workflows.codegen import read_cases
from services.inference.workflows.single import TRY_AGAIN, VERIFY
from services.inference.workflows.tools import ToolMathSettings, format_term
from services.orchestrator.buffer.buffer import advantage_groups
from services.trainer.losses import ALGORITHMS
from tests.integration.envgateway.conftest import CONFIG
from tests.unit.envgateway.webshop.made import write_catalogue
from tests.unit.envgateway.webshop.test_search import _product
from tests.unit.inference import test_codegen_verifier, test_tool_math
from tests.unit.orchestrator.builders import failure, group, trajectory
from tests.unit.orchestrator.rows import test_code_rows
from tests.unit.recipes.golden import REPOSITORY, load
from tests.unit.trainer import test_step

Probe = Callable[[], Awaitable[None] | None]


def a_failed_sample_leaves_its_siblings_compared() -> None:
    made = group(size=3)
    made.resolve(failure(index=1))
    for index, reward in ((0, 1.0), (2, 0.0)):
        made.resolve(trajectory(index=index, reward=reward))
    (found,) = advantage_groups(made)
    assert (found.size, found.mean) == (2, 0.5)
    alone = group(size=2)
    alone.resolve(failure(index=1))
    alone.resolve(trajectory(index=0, reward=1.0))
    assert all(found.rewards_equal for found in advantage_groups(alone)), "one alone is compared with no other"


def log_probabilities_are_over_what_is_kept() -> None:
    one = np.ones(1, np.float32)
    rows = SamplingRows(
        temperature=one, top_p=one, top_k=np.array([2]), min_p=one * 0, suppress_stop=np.zeros(1, bool),
        stop_ids=np.full((1, 1), -1), uniform=np.array([0.1]), record=np.zeros(1, bool),
    )  # fmt: skip
    drawn = sample(torch.log(torch.tensor([[0.3, 0.3, 0.4 / 3, 0.4 / 3, 0.4 / 3]])), rows)
    assert np.exp(drawn.logprobs[0]) == pytest.approx(0.5, rel=1e-4), "0.3 of the whole distribution"


def an_episode_opens_with_turns_of_user_and_assistant() -> None:
    alfworld = prompts.opening("pick_and_place-x", "a room", ["look"])
    webshop = [*webshop_pages.OPENING, {"role": "user", "content": "a page"}]
    for messages in (alfworld, webshop):
        begun = Episode(episode_id="e", observation="flat", messages=tuple(messages)).opening()
        assert begun == messages and len(begun) >= 5
        assert [message["role"] for message in begun] == ["user", "assistant"] * (len(begun) // 2) + ["user"]


def the_search_finds_whole_words_alone() -> None:
    index = SearchIndex([_product(1, "blue mugs"), _product(2, "lamp")])
    assert index.find("mugs", 5) == ["P1"] and index.find("mug", 5) == []


def prices_follow_the_seed() -> None:
    with tempfile.TemporaryDirectory() as folder:
        products = read_catalogue(find_files(write_catalogue(Path(folder)))).products.values()
    first, again, other = (draw_prices(products, random.Random(seed)) for seed in (1, 1, 2))
    assert first == again != other


def a_missing_file_is_named_with_its_command() -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.delenv("ROLLMILL_DATA_ROOT", raising=False)
        (told,) = missing_data(load("code/qwen3-8b-m2po-full"))
    assert "livecodebench" in told and "run: " in told and "ROLLMILL_DATA_ROOT" in told


async def without_a_right_solution_nothing_is_earned_for_validity() -> None:
    row = {"problem": "Print it.", "tests": test_codegen_verifier.STDIN, "solutions": ["a = 0", "b = 0"]}
    played = await test_codegen_verifier.play([test_codegen_verifier.RIGHT], test_codegen_verifier.GOOD, row=row)
    assert played.metrics["reference_missing"] == 1.0 and played.rewards("verifier") == [1.0]


def _cases(*written: tuple[str, str], num_cases: int) -> int:
    listed = json.dumps([{"input": given, "output": expected} for given, expected in written])
    return len(read_cases(f"```json\n{listed}\n```", is_function=False, num_cases=num_cases).cases)


def a_case_that_stands_twice_counts_once() -> None:
    assert _cases(("1", "2"), ("1", "2"), num_cases=2) == 0 and _cases(("1", "2"), ("3", "4"), num_cases=2) == 2


async def short_cases_are_run_whatever_the_tests_of_the_task_look_like() -> None:
    long = {"kind": "stdin", "cases": [{"stdin": "1\n2\n3\n", "expected": "a\nb\nc\n"}]}
    row = {"problem": "Print it.", "tests": long, "solution": "reference = right"}
    played = await test_codegen_verifier.play([test_codegen_verifier.RIGHT], test_codegen_verifier.GOOD, row=row)
    assert any(case.given == "1" for _, cases, _ in played.gateway.judged for case in cases)


def two_nodes_ask_for_keys_and_node_1_is_not_dialled() -> None:
    layout = lay_out(REPOSITORY / "recipes" / "code-multi-agent" / "qwen3-8b-codegen-verifier-m2po-full-2node")
    assert layout.has_keys and layout.recipe.inference["a"].node == 1
    assert not [where for where, _ in layout.recipe.ports() if "handshake" in where]


def the_last_tag_decides() -> None:
    said = "<verdict>reject</verdict> on reflection <verdict>approve</verdict>"
    assert read_verdict(said) is ReviewVerdict.APPROVE


def words_of_a_verdict_are_whole() -> None:
    assert (
        read_verdict("I disapprove.") is ReviewVerdict.UNPARSED and read_verdict("I approve.") is ReviewVerdict.APPROVE
    )


def prompts_ask_for_the_protocol() -> None:
    assert "<verdict>approve</verdict>" in VERIFY and "{review}" in TRY_AGAIN
    assert "ACTION:" in prompts.INSTRUCTION and "THOUGHT:" in prompts.INSTRUCTION
    assert "search[keywords]" in webshop_pages.RULES and "click[value]" in webshop_pages.RULES
    assert all(tag in str(ToolMathSettings().system) for tag in ("<reason>", "</reason>", "<answer>"))


def updates_stop_at_the_mean_ratio() -> None:
    for limit, applied in ((7.0, 3), (5.0, 1)):
        test_step.test_updates_stop_where_the_mean_ratio_is_above_its_limit(limit, applied, 10_000)


async def the_last_turn_is_graded() -> None:
    graded: list[str] = []

    def grade(task: Task, completion: str) -> float:
        graded.append(completion)
        return 0.0

    texts = [test_tool_math.call("print(6*7)"), "I do not know."]
    policy = await test_tool_math.served_policy(texts, context_length=8192)
    gateway = test_tool_math.FakeGateway(test_tool_math.PROGRAMS, reward=grade)
    context = test_tool_math.make_context(policy, gateway)
    await test_tool_math.ToolMath(ToolMathSettings()).run(test_tool_math.make_task(), context)
    assert graded == ["I do not know."], "not the 42 that the tool printed"


def an_answer_in_the_first_turn_is_well_formed() -> None:
    assert format_term(["<answer>1</answer>", "so it is"], "answer") == 0.0


async def a_call_has_failed_by_its_status() -> None:
    for code, share in (("print('Error')", 0.0), ("spin", 1.0)):
        sequence = await test_tool_math.play([test_tool_math.call(code), test_tool_math.ANSWER])
        assert sequence.metrics["tool_error_share"] == share


def short_and_unlabelled_blocks_do_not_hide_the_program() -> None:
    program = "print(sum(map(int, input().split())))"
    assert program_of(f"```python\n{program}\n```\nprints\n```\n3\n```").strip() == program
    assert program_of(f"```python\n{program}").strip() == program, "one that the end cut off"


async def passes(code: str, *cases: tuple[str, str]) -> list[bool]:
    """Whether a program passes each case, under the judge of the gateway."""
    pool = SandboxPool.start_before_threads(CONFIG)
    try:
        tests = [StdinTests(cases=(StdinCase(stdin=given, expected=expected),)) for given, expected in cases]
        results = [await Judge(pool).judge(JudgeRequest(code=code, tests=one)) for one in tests]
    finally:
        await pool.close()
    return [result.num_passed == 1 for result in results]


async def an_exit_code_is_an_error() -> None:
    assert await passes("import sys; print(1); sys.exit(int(input()))", ("0", "1"), ("3", "1")) == [True, False]


async def a_return_outside_of_a_function_does_not_compile() -> None:
    assert await passes("print(1)\nreturn", ("", "1")) == [False]


async def integers_are_exact_and_decimals_are_not() -> None:
    cases = ("100000001", "100000000"), ("0.3333333333", "0.333333")
    assert await passes("print(input())", *cases) == [False, True]


def an_output_keeps_each_reading_that_its_row_leaves_open() -> None:
    test_code_rows.test_an_output_that_can_be_read_in_several_ways_keeps_all_of_them([[4], [5]], [[4, [4]], [5, [5]]])
    test_code_rows.test_an_output_that_can_be_read_in_several_ways_keeps_all_of_them(
        ["12", "3"], [[12, "12"], [3, "3"]]
    )


def the_trust_region_is_of_a_whole_minibatch() -> None:
    assert ALGORITHMS["m2po"].needs_trust_region


PROBES: dict[str, Probe] = {
    "second moments of M2PO": the_trust_region_is_of_a_whole_minibatch,
    "a failed sample": a_failed_sample_leaves_its_siblings_compared,
    "log-probabilities of truncated sampling": log_probabilities_are_over_what_is_kept,
    "opening of an episode": an_episode_opens_with_turns_of_user_and_assistant,
    "WebShop's search": the_search_finds_whole_words_alone,
    "WebShop's prices and price limits": prices_follow_the_seed,
    "LiveCodeBench's file is missing": a_missing_file_is_named_with_its_command,
    "text of the coder that the verifier reads":
        test_codegen_verifier.test_the_verifier_reads_the_program_and_the_problem_without_examples,
    "no solution of a row passes all tests": without_a_right_solution_nothing_is_earned_for_validity,
    "a generated case that stands twice": a_case_that_stands_twice_counts_once,
    "generated cases with fewer lines than the task's own tests": short_cases_are_run_whatever_the_tests_of_the_task_look_like,
    "between two nodes": two_nodes_ask_for_keys_and_node_1_is_not_dialled,
    "several verdict tags": the_last_tag_decides,
    "a verdict without a tag": words_of_a_verdict_are_whole,
    "texts of prompts": prompts_ask_for_the_protocol,
    "a mean ratio above `early_stop_imp_ratio`": updates_stop_at_the_mean_ratio,
    "text that is graded": the_last_turn_is_graded,
    "turns of the format term": an_answer_in_the_first_turn_is_well_formed,
    "failed tool calls": a_call_has_failed_by_its_status,
    "the program in an answer": short_and_unlabelled_blocks_do_not_hide_the_program,
    "the exit code of a program": an_exit_code_is_an_error,
    "`return` outside of a function": a_return_outside_of_a_function_does_not_compile,
    "printed integers": integers_are_exact_and_decimals_are_not,
    "an expected value of a call": an_output_keeps_each_reading_that_its_row_leaves_open,
    "text keys of a dictionary that are integers":
        test_code_rows.test_a_dictionary_of_integers_is_marked_because_json_has_text_keys_only,
}  # fmt: skip
