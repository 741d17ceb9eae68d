"""An OpenEnv server (``make extra EXTRA=openenv``): guess a number; a hint follows each wrong guess.

envgateway: {openenv: {guess: {command: [python, openenv_server.py, "{port}"]}}}
workflow: {name: agent_env, settings: {environment: guess, max_turns: 4}}
"""

import random
import sys

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app

MOST = 8
SESSIONS = 256


class Guess(Action):
    text: str


class Hint(Observation):
    text: str


class GuessEnvironment(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self.number, self.guesses = 0, 0

    def reset(self, seed=None, episode_id=None, **options) -> Hint:
        self.number, self.guesses = random.Random(seed).randint(1, MOST), 0
        return Hint(text=f"1 to {MOST}?")

    def step(self, action: Guess, timeout_s=None, **options) -> Hint:
        self.guesses += 1
        text = action.text.strip()  # also control characters, which int() refuses: a policy may write them
        guess = int(text) if text.isdecimal() else 0
        if guess == self.number:
            return Hint(text="found", reward=1.0, done=True)
        return Hint(text="higher" if guess < self.number else "lower", reward=0.0)

    @property
    def state(self) -> State:
        return State(step_count=self.guesses)


if __name__ == "__main__":
    app = create_fastapi_app(GuessEnvironment, Guess, Hint, max_concurrent_envs=SESSIONS)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
