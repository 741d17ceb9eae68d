"""Settings of the environment that plays Harbor's task directories."""

from __future__ import annotations

from pydantic import Field

from services.common.config.base import Section


class HarborConfig(Section):
    skip_run: bool = False
    """Play tasks whose Dockerfile has RUN, or which name an image, without these: the programs that they would bring are on the
    gateway's machine already, in /usr. Left at false, such tasks are left out and counted."""
    command_time_s: float = Field(default=30.0, gt=0, le=45)
    """Wall-clock time of one command; then it is stopped, and the agent is told."""
    verifier_time_s: float = Field(default=45.0, gt=0, le=45)
    """Largest wall-clock time of tests/test.sh; a task's `verifier.timeout_sec` may be less. Tests that take longer give no
    reward."""
    agent_time_s: float = Field(default=3600.0, gt=0)
    """Largest wall-clock time of a task before its tests; a task's `agent.timeout_sec` may be less. The first turn after
    that ends the task, and the tests run."""
    cpu_time_s: float = Field(default=600.0, gt=0)
    """CPU time of all commands and the tests of a task together."""
    memory_bytes: int = Field(default=1 << 30, ge=64 << 20)
    """Largest memory of a task; its `environment.memory_mb` may be less."""
    disk_bytes: int = Field(default=256 << 20, ge=1 << 20)
    """Largest size of all files of a task, which are in memory too; its `environment.storage_mb` may be less."""
    num_files: int = Field(default=8192, ge=64)
    """Most files and directories of a task."""
    num_processes: int = Field(default=64, ge=8)
    """Most processes and threads of a task."""
    open_files: int = Field(default=256, ge=32)
    """Most open files of one process."""
    output_bytes: int = Field(default=1 << 20, ge=4096)
    """Bytes that one command may print; then it is stopped."""
    max_chars: int = Field(default=4000, ge=64)
    """A longer output of a command is cut in its middle before the agent reads it."""
    files_bytes: int = Field(default=32 << 20, ge=1024)
    """Largest size of a task's `environment`, and of its `tests`."""
