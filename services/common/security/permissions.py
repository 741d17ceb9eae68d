"""The table of permissions: which roles may call each RPC and each group of HTTP routes. Unlisted methods are denied.

A test compares the table with all protos, so that a new RPC cannot be forgotten.
"""

from __future__ import annotations

from collections.abc import Iterable

from services.common.security.roles import SERVICES, Role

_LOOKING = {Role.OPERATOR, Role.VIEWER}

RPCS: dict[str, dict[str, Iterable[Role]]] = {
    "rollmill.v1.PoolService": {
        "JoinPool": {Role.INFERENCE},
        "StreamReports": {Role.INFERENCE},
        "StreamTrajectories": {Role.INFERENCE},
        "JoinGateway": {Role.ENVGATEWAY},  # which learns from it that the run has ended, and nothing else of the run
    },
    "rollmill.v1.TrainingService": {
        "JoinTraining": {Role.TRAINER},
        "ReportTrainer": {Role.TRAINER},
        "PullBatch": {Role.TRAINER},
        "PublishVersion": {Role.TRAINER},
    },
    "rollmill.v1.WeightService": {
        "GetManifest": {Role.INFERENCE},
        "FetchWeights": {Role.INFERENCE},
    },
    "rollmill.v1.EnvironmentService": {
        "CreateEpisode": {Role.INFERENCE, Role.OPERATOR},
        "StepEpisode": {Role.INFERENCE, Role.OPERATOR},
        "CloseEpisode": {Role.INFERENCE, Role.OPERATOR},
    },
    "rollmill.v1.CodeExecutionService": {
        "ExecuteCode": {Role.INFERENCE, Role.CLIENT, Role.OPERATOR},
        "ExecuteCodes": {Role.INFERENCE, Role.CLIENT, Role.OPERATOR},
    },
    "rollmill.v1.JudgeService": {
        "Judge": {Role.INFERENCE, Role.CLIENT, Role.OPERATOR},
    },
    "rollmill.v1.RewardService": {
        "ComputeReward": {Role.INFERENCE, Role.OPERATOR},
        "ComputeRewards": {Role.INFERENCE, Role.OPERATOR},
    },
    "rollmill.v1.RunService": {
        "GetRun": {Role.INFERENCE, Role.TRAINER, *_LOOKING},  # how a joining process learns its settings
        "PauseRun": {Role.OPERATOR},
        "ResumeRun": {Role.OPERATOR},
        "StopRun": {Role.OPERATOR},
    },
    # A replica polls the status of its gateway, a trainer that of its publisher.
    "rollmill.v1.StatusService": {"GetStatus": {*_LOOKING, Role.ORCHESTRATOR, Role.INFERENCE, Role.TRAINER}},
    # A container is probed with the bundle of its own process.
    "grpc.health.v1.Health": {"Check": {*SERVICES, *_LOOKING}, "List": _LOOKING, "Watch": _LOOKING},
    "grpc.reflection.v1alpha.ServerReflection": {"ServerReflectionInfo": _LOOKING},
    "grpc.reflection.v1.ServerReflection": {"ServerReflectionInfo": _LOOKING},
}

HTTP: dict[str, Iterable[Role]] = {
    "endpoint": {Role.AGENT, Role.OPERATOR},
    "judge": {Role.CLIENT, Role.OPERATOR},
    "task_server": {Role.CLIENT, Role.OPERATOR},
    "metrics": _LOOKING,
    "page": _LOOKING,
}

_ALLOWED: dict[str, frozenset[Role]] = {
    f"/{service}/{method}": frozenset(roles) for service, methods in RPCS.items() for method, roles in methods.items()
} | {f"http:{group}": frozenset(roles) for group, roles in HTTP.items()}


def allowed(what: str) -> frozenset[Role]:
    """The roles that may call a method (``/rollmill.v1.RunService/StopRun``) or a group of routes (``http:judge``)."""
    return _ALLOWED.get(what, frozenset())
