"""The sources of a mixture, as ``watch``, ``status`` and the picture of a run show them."""

from __future__ import annotations

from rich.console import Console

from services.cli.console import source_words
from services.cli.inspect.plot import part_lines
from services.cli.watch import render
from services.common.pb import run_pb2
from services.common.telemetry.metrics import StepKey, source_key

ROW = {
    source_key(source, key): value
    for source, share in {"maths": 0.34, "code": 0.66}.items()
    for key, value in {
        StepKey.SHARE: share, StepKey.WANTED_SHARE: 1 / 3 if source == "maths" else 2 / 3, StepKey.STALENESS_MAX: 2.0
    }.items()
} | {source_key("code", StepKey.ROLLOUT_REWARD_MEAN): 0.125}  # fmt: skip


def shown(policies: list[run_pb2.PolicyProgress]) -> str:
    console = Console(record=True, width=140)
    console.print(render(run_pb2.RunProgress(policies=policies), "run"))
    return console.export_text()


def test_watch_shows_a_line_for_each_source_with_share_reward_and_staleness() -> None:
    text = shown([run_pb2.PolicyProgress(policy="model0", version=3, num_steps=9, metrics=ROW)])
    (code,) = [line.split() for line in text.splitlines() if " code " in line]
    (maths,) = [line.split() for line in text.splitlines() if " maths " in line]
    assert code[1:7] == ["code", "66.0%", "66.7%", "0.125", "≤", "2"]
    assert maths[1:5] == ["maths", "34.0%", "33.3%", "-"], "no rollout finished since the batch before"


def test_the_line_of_a_run_has_the_reward_of_the_batch_where_no_rollout_ended_since_the_batch_before() -> None:
    row = ROW | {source_key("maths", StepKey.BATCH_REWARD_MEAN): 0.25}
    assert "(wanted 33.3%), batch reward 0.250" in source_words(row)
    assert "(wanted 66.7%), reward 0.125" in source_words(row)


def test_sources_of_several_policies_are_told_apart() -> None:
    policies = [run_pb2.PolicyProgress(policy=name, metrics=ROW) for name in ("a", "b")]
    text = shown(policies)
    assert "a/code" in text and "b/maths" in text


def test_a_run_with_one_dataset_has_no_table_of_sources() -> None:
    assert "wanted" not in shown([run_pb2.PolicyProgress(policy="model0", metrics={"rollout_reward_mean": 0.5})])
    assert source_words({"rollout_reward_mean": 0.5}) == ""


def test_status_tells_the_sources_in_one_line() -> None:
    assert source_words(ROW).endswith("code 66.0% of the sequences (wanted 66.7%), reward 0.125")


def test_the_picture_draws_the_reward_of_each_source() -> None:
    assert [line.label for line in part_lines([[{"step": 1, **ROW}]])] == ["source maths", "source code"]
