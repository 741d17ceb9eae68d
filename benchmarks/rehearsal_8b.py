"""A rehearsal of 8B recipes without a GPU: memory of the trainers, and the way of a weight version to the engines.

- ``check_error``: the worst difference between `millrace check` and the peak of a training step in fake tensors of the
  true shapes, over the real recipes (``_rehearsal_memory.py``);
- ``publish_to_serving_s_8b``: from the announcement of a version to an engine's stage on the same host, extrapolated from
  the rates of one true layer and the embedding on this machine; ``snapshot_s_8b`` before it, while the trainer waits; and
  a table at 1, 5 and 17% changed elements over 25 Gbit/s (``_rehearsal_weights.py``).

    python benchmarks/rehearsal_8b.py [--quick] [--only memory|weights]
"""

from __future__ import annotations

import argparse

import torch

from benchmarks._rehearsal_memory import memory_rows
from benchmarks._rehearsal_weights import weight_rows
from benchmarks._report import report_facts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer recipes' layouts and a part of the embedding")
    parser.add_argument("--only", choices=("memory", "weights"), help="one of the two parts")
    arguments = parser.parse_args()
    facts: dict[str, object] = {}
    left_out = {}
    torch.set_num_threads(1)
    if arguments.only != "memory":
        facts |= weight_rows(arguments.quick)
        for row in facts["link_table"]:  # type: ignore[attr-defined]
            print(
                "  ".join(
                    f"{key} {value:.3g}" if isinstance(value, float) else f"{key} {value}" for key, value in row.items()
                )
            )
        print(
            f"8B on one host: {facts['publish_to_serving_s_8b']:.1f} s from announcement to stage "
            f"({facts['publish_to_serving_wall_s_8b']:.1f} by the clock, under this machine's load)",
            flush=True,
        )
    else:
        left_out["weights"] = "--only memory"
    if arguments.only != "weights":
        facts |= memory_rows(arguments.quick)
    else:
        left_out["memory"] = "--only weights"
    report_facts("rehearsal_8b", left_out=left_out, **facts)


if __name__ == "__main__":
    main()
