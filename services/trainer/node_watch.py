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
PARTING_S = 5.0  # between the end of another node's ranks and that of our own, when all end for one reason
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
        self._store: TCPStore | None = None
        self.lost: str | None = None  # in words, when this watch has ended the ranks
        self._thread = threading.Thread(target=self._run, name="nodes.watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, failed: bool = False) -> None:
        """``failed``: the ranks of this node have died, and the others need not find out by themselves."""
        with self._lock:
            self._stopped.set()
            if failed and self._store is not None:
                try:
                    self._store.add(_key(self._node_rank, "gone"), 1)
                except (DistNetworkError, DistStoreError):
                    pass  # the store has gone first, which says the same

    def _run(self) -> None:
        try:
            store = TCPStore(
                *self._place, is_master=False, timeout=timedelta(seconds=self._meet_s), wait_for_workers=False
            )
            store.set_timeout(timedelta(seconds=_CALL_S))
            with self._lock:
                self._store = store
            words, patience_s = self._beat(store)
        except (DistNetworkError, DistStoreError) as error:
            # torchrun, which waits at the same store, says it as well.
            words, patience_s = f"node 0 is gone: {str(error).splitlines()[0]}", PARTING_S
        if words and not self._stopped.wait(patience_s):
            with self._lock:
                if not self._stopped.is_set():
                    self.lost = words
                    sys.stderr.write(f"trainer: {words}; the ranks of this node are ended\n")
                    os.kill(os.getpid(), signal.SIGTERM)

    def _beat(self, store: TCPStore) -> tuple[str, float]:
        """Until stopped, or a node has gone: then what to say, and how long our own ranks may take to say it better."""
        heard: dict[int, tuple[int, float]] = {}
        while not self._stopped.wait(BEAT_S):
            store.add(_key(self._node_rank, "beats"), 1)
            now = time.monotonic()
            for node in self._others:
                if store.add(_key(node, "gone"), 0):
                    return f"the ranks of node {node} have died", PARTING_S
                count = store.add(_key(node, "beats"), 0)
                if node not in heard or heard[node][0] != count:
                    heard[node] = (count, now)
                elif count and now - heard[node][1] > self._lost_after_s:
                    # Who has never come is torchrun's to wait for.
                    return f"node {node} was not heard of for {self._lost_after_s:g} s", 0.0
        return "", 0.0


def _key(node: int, what: str) -> str:
    return f"millrace/nodes/{node}/{what}"
