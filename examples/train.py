"""Starts a run from Python, and reads its metrics.

python examples/train.py
"""

from pathlib import Path

import rollmill


def main() -> None:
    run = rollmill.run(Path(__file__).with_name("recipe.yaml"), run={"seed": 7})
    print({name: result["mean_reward"] for name, result in run.summary["evaluations"].items()})
    best = max(run.trajectories(), key=lambda row: row["reward"])
    print(best["task_group_id"], best["reward"], best["sequences"][0]["stop_reason"])
    print(run.traces().arrow().select(["task_id", "status"]).slice(0, 3).to_pylist())


if __name__ == "__main__":
    main()
