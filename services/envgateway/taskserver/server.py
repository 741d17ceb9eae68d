"""The task server: both protocols of AgentBench on one port, over the gateway's episodes."""

from __future__ import annotations

from aiohttp import web

from services.common.aio import TaskOwner
from services.common.config.processes.environments import TaskServerConfig
from services.common.errors import ConfigError
from services.common.http.listener import Listener
from services.envgateway.envs.episodes import EpisodeManager
from services.envgateway.envs.registry import EnvironmentRegistry
from services.envgateway.taskserver.adapter import AdapterProtocol
from services.envgateway.taskserver.classic import ClassicProtocol
from services.envgateway.taskserver.conversations import Conversations
from services.envgateway.taskserver.tasks import Tasks

PREFIX = "/api"


class TaskServer:
    """``start`` serves, ``stop`` ends. Raises ``ConfigError`` for settings that cannot work."""

    def __init__(
        self,
        config: TaskServerConfig,
        host: str,
        episodes: EpisodeManager,
        environments: EnvironmentRegistry,
        idle_s: float,
    ) -> None:
        """A conversation without a call for ``idle_s`` seconds ends."""
        assert config.port is not None
        tasks = Tasks(config, environments)
        if not tasks.all:
            absent = "".join(f"\n  {name}: {why}" for name, why in environments.absent.items())
            raise ConfigError(
                "envgateway.task_server has no environment to serve: name an environment under "
                f"envgateway.task_server.environments, or set up one of these:{absent}"
            )
        self.conversations = Conversations(episodes, idle_s=idle_s)
        self._tasks = TaskOwner()
        application = web.Application(client_max_size=config.body_bytes)
        # First the names that are fixed, then those with a task in the path.
        application.add_routes(ClassicProtocol(tasks, self.conversations).routes(PREFIX))
        application.add_routes(AdapterProtocol(tasks, self.conversations).routes(PREFIX))
        # A client that leaves ends no conversation: its turn is taken once, even if no client reads the result.
        self._listener = Listener(
            application, host, config.port,
            name="the task server", setting="envgateway.task_server.port", group="task_server", leaving_cancels=False,
        )  # fmt: skip

    @property
    def port(self) -> int:
        return self._listener.port

    @property
    def routes(self) -> list[tuple[str, str]]:
        """Method and path of everything that is served."""
        return self._listener.routes

    async def start(self) -> int:
        """Returns the port."""
        port = await self._listener.start()
        self._tasks.start(self.conversations.expire_forever(), "expire conversations")
        return port

    async def stop(self) -> None:
        await self._listener.stop()
        await self._tasks.close()
        await self.conversations.end_all()
