"""The threads of this process that run plain functions of users, and other work that blocks."""

from __future__ import annotations

from services.common.system.threads import DaemonThreads

THREADS = DaemonThreads(64)  # they run mostly Python, so more would only take turns
