"""The roles of a run, least privilege each, and the names under which those who serve are known.

A certificate is checked for what its holder *is* (``orchestrator.millrace.internal``), not for where it runs: addresses
change, and a replica that answers at the orchestrator's address is still no orchestrator. Names of hosts are in the
certificates beside these, for clients of others (``millrace keys --host``). Imports nothing heavy.
"""

from __future__ import annotations

from enum import Enum

DOMAIN = "millrace.internal"


class Role(Enum):
    """What the holder of a certificate or a token is in a run."""

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
    Role.OPERATOR: "people who run it: watch, pause, stop",
    Role.VIEWER: "people and dashboards that only look",
    Role.AGENT: "agent frameworks: the OpenAI-compatible endpoint only",
    Role.CLIENT: "other frameworks: judge and task server only",
}


class Peer(Enum):
    """Whom a caller means to reach; the certificate of who answers must have this name."""

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
"""What the certificate of each role may answer as. Roles that serve nothing are not in it."""
