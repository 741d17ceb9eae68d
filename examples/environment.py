"""An environment: guess a number; a wrong guess is told to be too low or too high.

envgateway: {environments: {guess: "environment:Guess"}}
workflow: {name: agent_env, settings: {environment: guess, max_turns: 10}}
"""

import random

import rollmill


class Guess(rollmill.Environment):
    def reset(self, task, seed: int) -> rollmill.Observation:
        self.turns, self.most = 0, int(task.get("most", 100))
        self.number = random.Random(seed).randint(1, self.most)  # the same for all rollouts of a task group
        return rollmill.Observation(text=f"Guess a number from 1 to {self.most}.")

    def step(self, action: str) -> rollmill.StepResult:
        self.turns += 1
        guess = int(action) if action.strip().isdigit() else 0
        if guess == self.number:
            return rollmill.StepResult(reward=1.0, done=True, metrics={"guesses": float(self.turns)})
        hint = "too low" if guess < self.number else "too high"
        return rollmill.StepResult(observation=f"{guess} is {hint}.", done=self.turns == 10)
