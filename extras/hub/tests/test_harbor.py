"""Harbor's task directories: the parts that are read, and refusals with name and line."""

from __future__ import annotations

import base64
import contextlib
import io
import os
import shutil
import tarfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extras.hub import harbor
from extras.hub.harbor import environment_files, read_dockerfile, read_task, verifier_files
from extras.hub.harbor_episode import reward_of
from services.cli.check.worlds import world_problems
from services.common.config.data import DatasetConfig
from services.common.config.loading import load_recipe
from services.common.errors import DatasetError
from services.envgateway.envs.base import EpisodeLostError
from services.orchestrator.tasks.datasets import open_source

EXAMPLES = Path(__file__).parents[3] / "examples" / "harbor"


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    return shutil.copytree(EXAMPLES, tmp_path / "tasks")


def members(packed: bytes) -> dict[str, tarfile.TarInfo]:
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        return {f"/{member.name}": member for member in archive}


def files(task: Path) -> set[str]:
    return {place for place, member in members(environment_files(read_task(task))).items() if not member.isdir()}


def test_rows_are_the_task_directories_by_name(tasks: Path) -> None:
    (tasks / "notes").mkdir()
    source = open_source(DatasetConfig(harbor=str(tasks)), 0)
    assert [source[row].task_id for row in range(len(source))] == ["add-numbers", "count-lines"]
    assert source[0].data["prompt"].startswith("The file `numbers.txt`")
    assert source[0].data["harbor"] == {"directory": str(tasks / "add-numbers"), "refusal": ""}


def test_a_task_that_cannot_be_played_is_left_out_and_told(tasks: Path) -> None:
    (tasks / "add-numbers" / "tests" / "test.sh").unlink()
    (tasks / "add-numbers" / "instruction.md").unlink()
    source = open_source(DatasetConfig(harbor=str(tasks)), 0)
    assert len(source) == 1
    assert source.left_out.reasons[0].startswith("task add-numbers: missing instruction.md, tests/test.sh in ")


def test_a_directory_without_tasks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match=r"no subdirectory of .* has a task.toml"):
        open_source(DatasetConfig(harbor=str(tmp_path)), 0)
    with pytest.raises(DatasetError, match="there is no directory"):
        open_source(DatasetConfig(harbor=str(tmp_path / "none")), 0)


def test_a_dockerfile_places_files_as_docker_does(tasks: Path) -> None:
    task = tasks / "count-lines"
    environment = task / "environment"
    (environment / "run.sh").write_text("true\n")
    (environment / "Dockerfile").write_text(
        "# comment\nFROM ubuntu:24.04 AS base\nENV SUB=in \\\n    OTHER=x\nWORKDIR /app\nWORKDIR ${SUB}\n"
        "COPY --chown=me:me logs /data\nCOPY run.sh bin/\nCOPY *.sh logs/a.log /srv/\nCOPY run.sh /opt/go\n"
        'USER nobody\nCMD ["bash"]\n'
    )
    read = read_task(task).dockerfile
    assert (str(read.workdir), read.variables) == ("/app/in", {"SUB": "in", "OTHER": "x"})
    assert files(task) == {
        "/data/a.log", "/data/b.log", "/app/in/bin/run.sh", "/srv/run.sh", "/srv/a.log", "/opt/go",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("ENTRYPOINT serve", "ENTRYPOINT serve: needs a container engine"),
        ("FROM other", "a second stage"),
        ("COPY --from=builder /a /app", "--from=builder needs"),
        ("COPY --chmod=755 a /app", "--chmod=755 needs"),
        ("ADD x.tar.gz /app", "needs a container engine"),
        ("COPY ../x /app", "only files of"),
        ("COPY x /etc/passwd", "/etc/passwd is not in a directory"),
        ("WORKDIR /usr/local", "/usr/local is not in a directory"),
        ("WORKDIR /app/../etc", "is not in a directory"),
        ("COPY x", "needs a source and a place"),
        ("COPY 'x /app", "No closing quotation"),
        ("WORKDIR ${X:-/app}", "write the value"),
        ("COPY <<EOF /app/x\nRUN hidden\nEOF", "text in place"),
        ('COPY ["a", "/app"]', "needs a container engine"),
    ],
)
def test_an_instruction_that_cannot_be_honoured_is_named_with_its_line(line: str, says: str) -> None:
    with pytest.raises(DatasetError, match=r"^here line 3: ") as raised:
        read_dockerfile(f"FROM debian\n\n{line}\n", "here")
    assert says in raised.value.message


def test_the_first_run_is_told() -> None:
    read = read_dockerfile("FROM a\nRUN apt-get update && \\\n  # why\n  apt-get install jq\nRUN b\\", "here")
    assert read.run == "line 2: RUN apt-get update && apt-get install jq"


@given(st.text(max_size=200))
def test_any_text_is_read_or_refused(text: str) -> None:
    with contextlib.suppress(DatasetError):
        assert read_dockerfile(text, "here").workdir.is_absolute()


@pytest.mark.parametrize(
    ("toml", "says"),
    [
        ("x = [", "cannot be read"),
        ("[[steps]]\nname = 'a'", "steps: needs"),
        ("[environment]\ngpus = 1", "environment.gpus"),
        ("[verifier]\nenvironment_mode = 'separate'", "verifier.environment_mode"),
        ("[verifier]\ntimeout_sec = -1", "verifier.timeout_sec is -1"),
        ("[agent]\ntimeout_sec = nan", "agent.timeout_sec is nan"),
        ("[environment]\nmemory = 'much'", "environment.memory is 'much'"),
        ("[verifier.env]\nKEY = '${OPENAI_API_KEY}'", "verifier.env.KEY reads a variable of the machine"),
        ("environment = 3", "environment is 3"),
    ],
)
def test_settings_that_cannot_be_kept_are_refused_with_the_task(tasks: Path, toml: str, says: str) -> None:
    (tasks / "add-numbers" / "task.toml").write_text(toml)
    with pytest.raises(DatasetError, match=r"^task add-numbers: ") as raised:
        read_task(tasks / "add-numbers")
    assert says in raised.value.message


def test_files_beside_the_dockerfile_that_are_not_read_are_refused(tasks: Path) -> None:
    (tasks / "add-numbers" / "environment" / "docker-compose.yaml").write_text("services: {}")
    with pytest.raises(DatasetError, match=r"environment/docker-compose.yaml: not read here"):
        read_task(tasks / "add-numbers")


def test_limits_are_those_of_the_file_in_both_spellings(tasks: Path) -> None:
    path = tasks / "add-numbers" / "task.toml"
    assert (read_task(path.parent).memory_bytes, read_task(path.parent).verifier_s) == (512 << 20, 30.0)
    path.write_text('[environment]\nmemory = "2G"\nstorage = "10M"\n')
    task = read_task(path.parent)
    assert (task.memory_bytes, task.storage_bytes, task.agent_s) == (2 * 10**9, 10 * 10**6, 600.0)


@pytest.mark.parametrize("part", ["instruction.md", "task.toml", "environment/Dockerfile", "tests/test.sh"])
def test_a_part_that_is_a_link_to_another_place_is_refused(tasks: Path, tmp_path: Path, part: str) -> None:
    outside = tmp_path / "outside"
    (tasks / "add-numbers" / part).rename(outside)
    (tasks / "add-numbers" / part).symlink_to(outside)
    with pytest.raises(DatasetError, match=f"{part} is a link to a place outside"):
        read_task(tasks / "add-numbers")


@pytest.mark.parametrize("part", ["instruction.md", "tests/test.sh"])
def test_a_part_that_is_a_pipe_is_missing(tasks: Path, part: str) -> None:
    (tasks / "add-numbers" / part).unlink()
    os.mkfifo(tasks / "add-numbers" / part)
    with pytest.raises(DatasetError, match=f"missing {part}"):
        read_task(tasks / "add-numbers")


def test_no_file_outside_of_the_task_is_read(tasks: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("key")
    task = tasks / "count-lines"
    (task / "environment" / "logs" / "link").symlink_to(tmp_path / "secret")
    (task / "tests" / "link").symlink_to(tmp_path / "secret")
    assert members(environment_files(read_task(task)))["/app/logs/link"].issym()
    packed = verifier_files(read_task(task))
    assert members(packed)["/tests/link"].issym() and b"key" not in packed
    (task / "environment" / "out").symlink_to(tmp_path)
    (task / "environment" / "Dockerfile").write_text("COPY out/secret /app/\n")
    with pytest.raises(DatasetError, match="leads out of environment"):
        files(task)


def test_files_that_are_missing_or_too_large_are_told(tasks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harbor, "_FILES_BYTES", 10)
    with pytest.raises(DatasetError, match="its files are larger than"):
        files(tasks / "count-lines")
    (tasks / "count-lines" / "environment" / "Dockerfile").write_text("COPY none.txt /app/\n")
    with pytest.raises(DatasetError, match=r"Dockerfile line 1: there is no none.txt in environment"):
        files(tasks / "count-lines")


def test_tasks_of_harbor_need_root(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = load_recipe(EXAMPLES.parent / "harbor.yaml", [], {})
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert [problem for problem in world_problems(recipe) if "tier 2" in problem]
    monkeypatch.setattr("os.geteuid", lambda: 0)
    assert world_problems(recipe) == []


# The reward files of a verifier: one number, or no reward at all.


def rewards(json: str | None = None, txt: str | None = None) -> dict[str, str | None]:
    return {
        name: None if text is None else base64.b64encode(text.encode()).decode()
        for name, text in (("reward.json", json), ("reward.txt", txt))
    }


def test_json_goes_before_text_and_its_other_numbers_are_metrics() -> None:
    assert reward_of(rewards('{"reward": 0.5, "style": 1}', "1"), "a") == (0.5, {"reward_style": 1.0})
    assert reward_of(rewards('{"tests": 3}'), "a") == (3.0, {})
    assert reward_of(rewards(None, " 0.25\n"), "a") == (0.25, {})


@pytest.mark.parametrize(
    ("json", "txt"),
    [
        (None, None), (None, ""), (None, "one"), (None, "inf"), (None, "1 2"), ("", "1"), ("[]", None), ("{}", None),
        ("{", None), ('{"a": 1, "b": 2}', None), ('{"reward": "1"}', None), ('{"reward": true}', None),
        ('{"reward": NaN}', None), ('{"reward": 1, "b": null}', None), ("[" * 20_000, None),
    ],
)  # fmt: skip
def test_anything_else_is_no_reward(json: str | None, txt: str | None) -> None:
    with pytest.raises(EpisodeLostError, match=r"^task a: "):
        reward_of(rewards(json, txt), "a")
