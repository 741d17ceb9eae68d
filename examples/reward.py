"""A reward: a function of the dataset row and the text of the policy's last turn.

workflow: {name: single_turn, settings: {reward: "reward:exact_match"}}
"""

import rollmill


def exact_match(task, completion: str) -> float:
    """1 for the right number in a box, 0.1 for a wrong one, 0 without a box."""
    said = rollmill.last_boxed(completion)
    if said is None:
        return 0.0
    return 1.0 if said == str(rollmill.answer_of(task)) else 0.1
