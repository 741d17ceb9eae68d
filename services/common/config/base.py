"""The base of every config section: strict, frozen, and its own manual."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Port = Annotated[int, Field(ge=0, le=65535)]  # 0 takes a free one


class Section(BaseModel):
    """Unknown keys are refused, as are numbers that are infinite or NaN; the docstring under a field is its description in the
    schema."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, validate_default=True, allow_inf_nan=False
    )


def refuse_unread(section: Section, choice: str, readers: Mapping[str, Sequence[str]]) -> None:
    """Raise ``ValueError`` for a setting that has another value than its default, and is not read with the chosen value.

    ``readers``: each setting with the values of ``choice`` that read it.
    """
    chosen = getattr(section, choice)
    for key, values in readers.items():
        value = getattr(section, key)
        if chosen not in values and value != type(section).model_fields[key].default:
            shown = f"{value:g}" if isinstance(value, float) else value
            shown = "set" if isinstance(value, Section) else shown
            raise ValueError(
                f"{key} is {shown}, and {choice}: {chosen} does not read it: leave {key} out, or write {choice}: "
                f"{' or '.join(values)}"
            )


class OnPort(Section):
    port: Port = 0
    """gRPC port; 0 takes a free one."""


class Listening(OnPort):
    host: str = "127.0.0.1"
    """Bind address. Another than loopback needs keys (`rollmill keys`, docs/security.md)."""


class OnNode(Section):
    node: int = Field(default=0, ge=0)
    """Its node. `rollmill run` starts the processes of node 0 and prints the commands for the others. A gateway on another
    node, with its environments, rewards and programs, reports its own address for replicas; its `host` is then left out,
    and no task is issued until it has joined."""


class HttpService(Section):
    """An HTTP interface beside a service's gRPC port, at the same host."""

    port: Port | None = None
    """HTTP port; 0 takes a free one, null serves none."""


class Timeouts(Section):
    """Of an environment in another process."""

    start_timeout_s: float = Field(default=50.0, gt=0)
    """Starting the process, connecting to it and beginning an episode may each take this long."""
    step_timeout_s: float = Field(default=50.0, gt=0)
    """One turn may take this long; then the episode is lost, and played again. Never a reward."""


class ServerSection(Section):
    """A server that runs elsewhere, or that the gateway starts."""

    url: str | None = None
    """Address of a running server, such as `http://127.0.0.1:8000` of OpenEnv, or `http://127.0.0.1:8000/mcp` of MCP over
    streamable HTTP."""
    command: list[str] = []
    """Instead of `url`: program and arguments. A path that begins with `./` is relative to the recipe's file. Of MCP, a server
    over standard input and output, such as `[python, ./server.py]`, where `python` is the gateway's own. Of OpenEnv, one
    that serves the environment at the port `{port}`, such as ["{python}", server.py, "{port}"], where `{python}` is the
    gateway's interpreter, or [docker, run, --rm, --publish, "{port}:8000", IMAGE]: started with the first episode, again
    after its end, ended with the gateway."""

    @model_validator(mode="after")
    def _one_server(self) -> ServerSection:
        if bool(self.command) == bool(self.url):
            given = "both are set" if self.url else "neither is set"
            raise ValueError(f"write either `command` (a program and its arguments) or `url`; {given}")
        if self.url and not self.url.startswith(("http://", "https://")):
            raise ValueError(f"url is {self.url!r}: write an address that begins with http:// or https://")
        return self


class OnDevice(Section):
    """What computes on GPUs or on a CPU."""

    gpus: list[Annotated[int, Field(ge=0)]] = []
    """GPUs of its node, of a trainer on each of its nodes, for its exclusive use, counted among those that
    CUDA_VISIBLE_DEVICES shows; empty: all of these. Variables: INFERENCE_<NAME>_GPUS, and TRAINER_<POLICY>_GPUS, which
    also sets `num_ranks`: a rank has one."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto` takes a GPU when there is one. With `gpus` it is `cuda`: never a fall-back to the CPU."""
    threads: int = Field(default=1, ge=1)
    """Threads on a CPU: of torch's operations, for each rank of a trainer, and of the compiled step of a small model, which
    share its rows."""


class Limits(Section):
    """Limits of programs, of a process that lives on between calls, and of a task's container."""

    cpu_time_s: float = Field(default=5.0, gt=0)
    """Largest CPU time, of all processes and of all calls together."""
    memory_bytes: int = Field(default=512 << 20, ge=1 << 20)
    """Largest memory of all processes together."""
    output_bytes: int = Field(default=65536, ge=1)
    """Bytes that one program, cell or command may print on each of stdout and stderr. The rest of a program's output is
    dropped; a cell or command is stopped."""


def with_device(written: Any, on_gpu: dict[str, Any], on_cpu: dict[str, Any]) -> Any:
    """A section as it is written, with ``auto`` replaced as soon as its device is known: by ``gpus`` or by ``device``.

    >>> with_device({"gpus": [0], "dtype": "auto"}, {"dtype": "bfloat16"}, {"dtype": "float32"})
    {'gpus': [0], 'dtype': 'bfloat16', 'device': 'cuda'}
    """
    device = written.get("device", "auto") if isinstance(written, dict) else None
    if device == "auto" and written.get("gpus"):
        device = "cuda"
    if device not in ("cuda", "cpu"):
        return written
    values = on_gpu if device == "cuda" else on_cpu
    filled = {key: value for key, value in values.items() if written.get(key, "auto") == "auto"}
    return {**written, "device": device, **filled}
