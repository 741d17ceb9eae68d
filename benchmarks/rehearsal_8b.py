"""A rehearsal of 8B recipes without a GPU: memory of the trainers, and the way of a weight version to the engines.

- ``check_error``: the worst difference between `rollmill check` and the peak of a training step in fake tensors of the
  true shapes, over the real recipes (``_rehearsal_memory.py``);
- ``publish_to_serving_s_8b``: from the announcement of a version to an engine's stage on the same host, extrapolated from
  the rates of one true layer and the embedding on this machine; ``snapshot_s_8b`` before it, while the trainer waits; and
  a table at 1, 5 and 17% changed elements over 25 Gbit/s (``_rehearsal_weights.py``);
- ``transports``: a model of ``--model-gb`` for real, by every way to the tensors of an engine; not with --quick
  (``_rehearsal_transports.py``).

    python benchmarks/rehearsal_8b.py [--quick] [--only memory|weights|transports] [--model-gb 2]
"""

from __future__ import annotations

import argparse
from typing import Any

import torch

from benchmarks._rehearsal_memory import memory_rows
from benchmarks._rehearsal_transports import transport_rows, why_not
from benchmarks._rehearsal_weights import weight_rows
from benchmarks._report import report_facts

PARTS = ("weights", "transports", "memory")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--quick", action="store_true", help="larger blocks of the head, a part of the embedding, no model for real"
    )
    parser.add_argument("--only", choices=PARTS, help="one of the parts")
    parser.add_argument("--model-gb", type=float, default=2.0, help="size of the model that takes all ways, in bf16")
    arguments = parser.parse_args()
    facts: dict[str, object] = {}
    left_out = {part: f"--only {arguments.only}" for part in PARTS if arguments.only not in (None, part)}
    size_bytes = int(1e9 * arguments.model_gb)
    if reason := "--quick" if arguments.quick and arguments.only is None else why_not(size_bytes):
        left_out.setdefault("transports", reason)
    torch.set_num_threads(1)
    if "weights" not in left_out:
        facts |= weight_rows(arguments.quick)
        _print_table(facts["link_table"])
        print(
            f"8B on one host: {facts['publish_to_serving_s_8b']:.1f} s from announcement to stage "
            f"({facts['publish_to_serving_wall_s_8b']:.1f} by the clock, under this machine's load)",
            flush=True,
        )
    if "transports" not in left_out:
        facts |= transport_rows(size_bytes)
        _print_table(facts["transports"])
    if "memory" not in left_out:
        facts |= memory_rows(arguments.quick)
    report_facts("rehearsal_8b", left_out=left_out, **facts)


def _print_table(rows: Any) -> None:
    for row in rows:
        print(
            "  ".join(
                f"{key} {value:.3g}" if isinstance(value, float) else f"{key} {value}" for key, value in row.items()
            ),
            flush=True,
        )


if __name__ == "__main__":
    main()
