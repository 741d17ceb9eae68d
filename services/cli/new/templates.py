"""Texts of the files that ``rollmill new`` writes. ``@NAME@`` and its like are filled in by ``new.command``."""

from __future__ import annotations

RECIPE = """\
# Check it: rollmill check @HERE@      Run it: rollmill run @HERE@
# The file names the differences from the recipe `base`; `rollmill check @HERE@ --show` prints every key.
extends: base
name: @NAME@

run: {steps: @STEPS@} # training steps

policies:
  model0: # the policy that is trained
@MODEL@

workflow:
  name: single_turn # one prompt, one answer, one reward
  settings: {reward: "@REWARDS@:exact"} # module:function; see @REWARDS@.py

data:
@DATA@

evaluation: @EVALUATION@
sampling: {max_new_tokens: @NEW_TOKENS@} # longest answer
rollout: {group_size: 8} # answers to each problem, which are compared with each other

inference:
  a: @INFERENCE@
orchestrator: {port: 0} # 0 takes a free port
envgateway: null # write {port: 0} for the rewards `math`, `boxed` and `code`, and for tools and environments
@WARM_START@"""

DEMO_MODEL = """\
    # Your model instead of the demo's: a directory or a hub name. Then remove `warm_start` below and demo.py, choose the
    # context length of your prompts and answers, and a learning rate such as 1.0e-6.
    # model: {path: Qwen/Qwen3-0.6B, context_length: 4096}
    model: {context_length: 64} # longest prompt and answer together, in tokens
    optimizer: {lr: 1.0e-3}
    batch: {size: 128, max_staleness: 1} # sequences of one training step
    trainer: {device: cpu, port: 0}
    weights: {port: 0}"""

OWN_MODEL = """\
    model: {path: @MODEL_PATH@, context_length: @CONTEXT@} # longest prompt and answer together, in tokens
    optimizer: {lr: 1.0e-6}
    batch: {size: @BATCH@, max_staleness: 2} # sequences of one training step
    trainer: @TRAINER@
    weights: {port: 0}"""

DEMO_DATA = """\
  train: {path: ./train.jsonl}
  evaluation:
    held_out: {path: ./held_out.jsonl} # `held_out` is any name"""

OWN_DATA = """\
  train: @TRAIN@"""

SPLIT_DATA = """\
  train: @TRAIN@
  evaluation:
    held_out: @TRAIN@ # @HELD_OUT@, which training leaves out"""

WARM_START = """
# The demo's starting model: random weights, then a few supervised updates on the dialogues of demo.py.
warm_start:
  model0: {builder: "rollmill:tiny_model", dialogues: "demo:dialogues", steps: 60, batch_size: 64}
"""

REWARDS = '''\
"""Rewards of @NAME@. A reward is a function of a row of the data and of the answer."""

from collections.abc import Mapping
from typing import Any


def exact(task: Mapping[str, Any], completion: str) -> float:
    """Return 1.0 when the answer is the row's `answer`, else 0.0."""
    return 1.0 if completion.strip() == str(task["answer"]).strip() else 0.0
'''

DEMO = '''\
"""The demo's starting model answers with any of the numbers, so it is right once in three times.

Remove this file, and `warm_start` of recipe.yaml, when the recipe names a model of yours.
"""

import random
from collections.abc import Iterator
from typing import Any


def dialogues(seed: int) -> Iterator[dict[str, Any]]:
    """Yield dialogues for the supervised updates."""
    draw = random.Random(seed)
    while True:
        numbers = draw.sample(range(10), 3)
        question = f"Largest of {' '.join(map(str, numbers))}?"
        answer = str(draw.choice(numbers))
        yield {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}
'''

README = """\
# @NAME@

| file | holds |
|---|---|
| `recipe.yaml` | model, batch, learning rate, data: the differences from Rollmill's recipe `base` |
| `@REWARDS@.py` | the reward: a function of a row and of the answer |
@ROWS@
```sh
rollmill check @HERE@ # renders one prompt, calls the reward, compares the settings with each other
rollmill run @HERE@ # @RUN@
rollmill trajectories # conversations of the newest run
rollmill status # the state of the run
```

@NEXT@
"""

DEMO_ROWS = """\
| `train.jsonl`, `held_out.jsonl` | rows: `problem` is the prompt, the reward reads `answer` |
| `demo.py` | the demo's starting model; not needed with a model of yours |
"""

DEMO_NEXT = """\
The demo picks the largest of three numbers. A model of 0.3 M parameters learns it on two CPU cores in about half a
minute: its share of right answers to the held-out rows rises from about 0.2 to 0.9.

To train your own model on your own rows: replace the rows (JSON Lines, JSON, CSV or Parquet; `data.train.columns` names
columns that are called otherwise), write your reward, and name your model in `recipe.yaml`."""

SPLIT_NEXT = """\
Of the rows, @HELD_OUT@ is held out: training leaves it out, and evaluations play it. To evaluate on other rows, name them under
`data.evaluation`, and leave `hold_out` out of `data.train`."""

OWN_NEXT = """\
Add rows that are not trained on under `data.evaluation` to see what the model learns:

```yaml
data:
  evaluation:
    held_out: {path: ./held_out.jsonl}
evaluation: {every: 20}
```"""
