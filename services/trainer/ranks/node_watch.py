"""Detects lost nodes of a trainer: the launcher of each node increments a heartbeat counter in the rendezvous store.

gloo notices the end of a peer's process at once, but not the loss of its machine; NCCL notices both only at the deadline
of a collective, after half an hour.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from datetime import timedelta

from torch.distributed import DistNetworkError, DistStoreError, TCPStore

BEAT_S = 2.0
END_TOGETHER_S = 5.0  # time for our ranks to end by themselves after those of another node
_CALL_S = 20.0


class NodeWatch:
    """Thread beside torchrun's launcher that ends this process's ranks by SIGTERM when a node is lost."""

    def __init__(
        self, host: str, port: int, node_rank: int, num_nodes: int, meet_s: float, lost_after_s: float
    ) -> None:
        self._place = (host, port)
        self._node_rank = node_rank
        self._others = [node for node in range(num_nodes) if node != node_rank]
        self._meet_s = meet_s
        self._lost_after_s = lost_after_s
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        self._store: TCPStore | None = None
        self.lost: str | None = None  # the reason, when this watch has ended the ranks
        self._thread = threading.Thread(target=self._run, name="nodes.watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, failed: bool = False) -> None:
        """Stop the watch. ``failed`` tells the other nodes that the ranks of this node died."""
        with self._lock:
            self._stopped.set()
            if failed and self._store is not None:
                try:
                    self._store.add(_key(self._node_rank, "gone"), 1)
                except (DistNetworkError, DistStoreError):
                    pass  # the other nodes notice the loss of the store as well

    def _run(self) -> None:
        try:
            store = TCPStore(
                *self._place, is_master=False, timeout=timedelta(seconds=self._meet_s), wait_for_workers=False
            )
            store.set_timeout(timedelta(seconds=_CALL_S))
            with self._lock:
                self._store = store
            reason, grace_s = self._beat(store)
        except (DistNetworkError, DistStoreError) as error:
            # torchrun waits at the same store and reports the loss as well.
            reason, grace_s = f"node 0 is lost: {str(error).splitlines()[0]}", END_TOGETHER_S
        if reason and not self._stopped.wait(grace_s):
            with self._lock:
                if not self._stopped.is_set():
                    self.lost = reason
                    sys.stderr.write(f"trainer: {reason}; ending the ranks of this node\n")
                    os.kill(os.getpid(), signal.SIGTERM)

    def _beat(self, store: TCPStore) -> tuple[str, float]:
        """Beat until stopped or until a node is lost; returns the reason and the time that our ranks have to end."""
        heard: dict[int, tuple[int, float]] = {}
        while True:  # the first beat at once: a node that is lost without one counts as one that never joined
            store.add(_key(self._node_rank, "beats"), 1)
            now = time.monotonic()
            for node in self._others:
                if store.add(_key(node, "gone"), 0):
                    return f"the ranks of node {node} have died", END_TOGETHER_S
                count = store.add(_key(node, "beats"), 0)
                if node not in heard or heard[node][0] != count:
                    heard[node] = (count, now)
                elif count and now - heard[node][1] > self._lost_after_s:
                    # torchrun waits for a node that never joined.
                    return f"node {node} sent no heartbeat for {self._lost_after_s:g} s", 0.0
            if self._stopped.wait(BEAT_S):
                return "", 0.0


def _key(node: int, what: str) -> str:
    return f"rollmill/nodes/{node}/{what}"
