"""An engine: a table of letters that follow each other, instead of a neural network. Text is bytes.

    inference: {a: {engine: "engine:Letters", engine_settings: {text: "the quick brown fox"}}}

With weights of the policy (``has_weights`` left out), ``self.setup.weights`` has the starting tensors and ``load(update)`` is given
newer ones.
"""

import math
import random

import rollmill


class Letters(rollmill.Engine):
    has_weights = False

    def __init__(self, setup: rollmill.EngineSetup) -> None:
        super().__init__(setup)
        self.letters = setup.settings.get("text", "abcabd").encode()
        self.followers: dict[int, list[int]] = {}
        for letter, follower in zip(self.letters, self.letters[1:] + self.letters[:1], strict=True):
            self.followers.setdefault(letter, []).append(follower)

    async def tokens(self, request: rollmill.GenerationRequest):
        """Draw the next letter from those that follow the last one, and end the turn with probability 1/8."""
        draw, last = random.Random(request.seed), request.prompt_ids[-1]
        while True:
            if draw.random() < 1 / 8 and request.stop_token_ids:
                yield request.stop_token_ids[0], math.log(1 / 8)
            choices = self.followers.get(last, list(self.letters))
            last = draw.choice(choices)
            yield last, math.log(7 / 8 * choices.count(last) / len(choices))
