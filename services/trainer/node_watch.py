"""Whether the other nodes of a trainer are still there: each counts up in the store that the ranks met at.

gloo hears at once when a peer's process ends, but nothing when its machine is gone; NCCL hears neither before the
deadline of a collective, half an hour. So the launchers of all nodes beat a pulse. It knows nothing about ranks.
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
LOST_AFTER_S = 60.0
PARTING_S = 10.0  # between the end of the store and our own end, when all end in order
_CALL_S = 20.0


class NodeWatch:
    """A thread beside torchrun's launcher; ends this process's ranks by SIGTERM when a node is lost."""

    def __init__(
        self, host: str, port: int, node_rank: int, num_nodes: int, meet_s: float, lost_after_s: float = LOST_AFTER_S
    ) -> None:
        self._place = (host, port)
        self._node_rank = node_rank
        self._others = [node for node in range(num_nodes) if node != node_rank]
        self._meet_s = meet_s
        self._lost_after_s = lost_after_s
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        self.lost: str | None = None  # in words, when this watch has ended the ranks
        self._thread = threading.Thread(target=self._run, name="nodes.watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        with self._lock:
            self._stopped.set()

    def _run(self) -> None:
        try:
            store = TCPStore(
                *self._place, is_master=False, timeout=timedelta(seconds=self._meet_s), wait_for_workers=False
            )
            store.set_timeout(timedelta(seconds=_CALL_S))
            words = self._beat(store)
        except (
            DistNetworkError,
            DistStoreError,
        ) as error:  # torchrun, which waits for the same store, tells it as well
            words = f"node 0 is gone: {str(error).splitlines()[0]}"
        if words and not self._stopped.wait(PARTING_S if "node 0" in words else 0.0):
            with self._lock:
                if not self._stopped.is_set():
                    self.lost = words
                    sys.stderr.write(f"trainer: {words}; the ranks of this node are ended\n")
                    os.kill(os.getpid(), signal.SIGTERM)

    def _beat(self, store: TCPStore) -> str:
        """Until stopped, or a node was silent for too long: then who."""
        heard: dict[int, tuple[int, float]] = {}
        while not self._stopped.wait(BEAT_S):
            store.add(_key(self._node_rank), 1)
            now = time.monotonic()
            for node in self._others:
                count = store.add(_key(node), 0)
                if node not in heard or heard[node][0] != count:
                    heard[node] = (count, now)
                elif (
                    count and now - heard[node][1] > self._lost_after_s
                ):  # who has never come is torchrun's to wait for
                    return f"node {node} was not heard of for {self._lost_after_s:g} s"
        return ""


def _key(node: int) -> str:
    return f"millrace/nodes/{node}"
