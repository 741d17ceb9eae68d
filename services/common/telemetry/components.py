"""Names of components in time accounts, stalls and metrics: built and recognised here only.

replica/a   replica/a/records   replica/a/weights/model0   replica/a/engine/model0
trainer/model0   trainer/model0/rank1   publisher/model0   orchestrator   envgateway   envgateway/workers
"""

from __future__ import annotations

from typing import NewType

Component = NewType("Component", str)

NOBODY = Component("")  # waited for: an activity that is the component's own work
ORCHESTRATOR = Component("orchestrator")
GATEWAY = Component("envgateway")
GATEWAY_WORKERS = Component("envgateway/workers")
REDIS = Component("redis")
INFERENCE = Component("inference")  # all replicas, where none is named
PERSON = Component("person")  # a person has paused the run
DISK = Component("disk")
DATASET = Component("dataset")
WORKFLOW = Component("workflow")
ROLLOUTS = Component("rollouts")

_REPLICA, _TRAINER, _PUBLISHER, _ENGINE, _WEIGHTS = "replica/", "trainer/", "publisher/", "engine/", "weights/"
_RECORDS, _RANK = "records", "/rank"


def replica(replica_id: str) -> Component:
    return Component(f"{_REPLICA}{replica_id}")


def trainer(policy: str, rank: int = 0) -> Component:
    """
    >>> trainer("model0"), trainer("model0", 1)
    ('trainer/model0', 'trainer/model0/rank1')
    """
    return Component(f"{_TRAINER}{policy}" + (f"{_RANK}{rank}" if rank else ""))


def publisher(policy: str) -> Component:
    return Component(f"{_PUBLISHER}{policy}")


def engine(policy: str) -> Component:
    """The engine of a policy, as named by its replica; ``part`` makes the name unique in the run."""
    return Component(f"{_ENGINE}{policy}")


def weights(policy: str) -> Component:
    """The weights of a policy, as named by the replica that holds them; ``part`` makes the name unique in the run."""
    return Component(f"{_WEIGHTS}{policy}")


def part(owner: Component, inner: Component) -> Component:
    """
    >>> part(replica("a"), weights("model0"))
    'replica/a/weights/model0'
    """
    return Component(f"{owner}/{inner}")


def records(owner: Component) -> Component:
    """The records of a replica on their way to the orchestrator."""
    return Component(f"{owner}/{_RECORDS}")


def is_replica(component: str) -> bool:
    """Whether the component is a whole replica, not a part."""
    return is_of_replica(component) and component.count("/") == 1


def is_of_replica(component: str) -> bool:
    """Whether the component is a replica or a part of one."""
    return component.startswith(_REPLICA)


def replica_id(component: str) -> str:
    """The id of a replica, from its component."""
    return component.removeprefix(_REPLICA)


def is_of_trainer(component: str) -> bool:
    """Whether the component is any rank of a trainer."""
    return component.startswith(_TRAINER)


def is_publisher(component: str) -> bool:
    return component.startswith(_PUBLISHER)


def is_weights(component: str) -> bool:
    """Whether the component is the weights of a policy in a replica."""
    return f"/{_WEIGHTS}" in component


def is_records(component: str) -> bool:
    return component.endswith(f"/{_RECORDS}")


def split(component: str) -> tuple[Component, Component]:
    """The replica and the part of a component; the part is ``NOBODY`` for a whole component.

    >>> split("replica/a/weights/model0"), split("trainer/model0/rank1")
    (('replica/a', 'weights/model0'), ('trainer/model0/rank1', ''))
    """
    for inner in (_WEIGHTS, _ENGINE, _RECORDS):
        whole, between, rest = component.partition(f"/{inner}")
        if between and is_of_replica(whole):
            return Component(whole), Component(f"{inner}{rest}")
    return Component(component), NOBODY
