"""The roles of a run, with least privilege each, and the names of servers in certificates.

A certificate is checked for the role of its holder (``orchestrator.rollmill.internal``), not for its address: addresses
change, and a replica at the orchestrator's address is still no orchestrator. Host names are also in the certificates,
for other clients (``rollmill keys --host``). No heavy imports.
"""

from __future__ import annotations

from enum import Enum

DOMAIN = "rollmill.internal"


class Role(Enum):
    """The role of the holder of a certificate or a token in a run."""

    ORCHESTRATOR = "orchestrator"
    INFERENCE = "inference"
    TRAINER = "trainer"
    PUBLISHER = "publisher"
    ENVGATEWAY = "envgateway"
    OPERATOR = "operator"
    VIEWER = "viewer"
    AGENT = "agent"
    CLIENT = "client"


SERVICES = frozenset({Role.ORCHESTRATOR, Role.INFERENCE, Role.TRAINER, Role.PUBLISHER, Role.ENVGATEWAY})

WHAT_FOR: dict[Role, str] = {
    Role.ORCHESTRATOR: "the process that issues tasks",
    Role.INFERENCE: "replicas: play tasks, fetch and relay weights",
    Role.TRAINER: "trainers: pull batches, announce versions",
    Role.PUBLISHER: "weight publishers, started by trainers",
    Role.ENVGATEWAY: "environments, judge, sandbox",
    Role.OPERATOR: "people: watch, pause, stop the run",
    Role.VIEWER: "people and dashboards that only look",
    Role.AGENT: "agent frameworks: the OpenAI-compatible endpoint only",
    Role.CLIENT: "other frameworks: judge and task server only",
}


class Peer(Enum):
    """The service that a caller wants to reach; the peer's certificate must have this name."""

    MEMBER = "member"  # any process of the run that serves
    ORCHESTRATOR = "orchestrator"
    ENVGATEWAY = "envgateway"
    WEIGHTS = "weights"  # a publisher, or a replica that relays

    @property
    def dns_name(self) -> str:
        return f"{self.value}.{DOMAIN}"


PEERS_OF: dict[Role, tuple[Peer, ...]] = {
    Role.ORCHESTRATOR: (Peer.MEMBER, Peer.ORCHESTRATOR),
    Role.INFERENCE: (Peer.MEMBER, Peer.WEIGHTS),
    Role.TRAINER: (Peer.MEMBER,),
    Role.PUBLISHER: (Peer.MEMBER, Peer.WEIGHTS),
    Role.ENVGATEWAY: (Peer.MEMBER, Peer.ENVGATEWAY),
}
"""Names for which the certificate of each role is valid. Roles without a server are absent."""
