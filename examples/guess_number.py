"""A verifiers environment (``make install-verifiers``): guess a number in four turns; a hint follows each wrong guess.

data: {train: {verifiers: guess_number, settings: {taskset: {most: 8}}}}
workflow: {name: verifiers}
inference: {a: {endpoint: {port: 0}}}
"""

import verifiers.v1 as vf

__all__ = ["GuessEnv", "GuessTaskset"]

TURNS = 4


class GuessData(vf.TaskData):
    number: int


class GuessTask(vf.Task[GuessData]):
    @vf.reward
    async def found(self, trace) -> float:
        return float((trace.last_message.content or "").strip() == str(self.data.number))

    @vf.metric
    async def guesses(self, trace) -> float:
        return float(trace.num_turns)


class GuessConfig(vf.TasksetConfig):
    most: int = 8


class GuessTaskset(vf.Taskset[GuessTask, GuessConfig]):
    def load(self):
        most = self.config.most
        for number in range(1, most + 1):
            yield GuessTask(GuessData(id=str(number), number=number, prompt=f"1 to {most}?"), self.config.task)


class GuessEnv(vf.SingleAgentEnv):
    async def run(self, task, agents) -> None:
        async with agents.agent.interaction(task) as game:
            turn = await game.turn()
            for _ in range(TURNS - 1):
                if turn.terminated or turn.last_reply == str(task.data.number):
                    break
                guess = int(turn.last_reply) if turn.last_reply.isdecimal() else 0
                turn = await game.turn("higher" if guess < task.data.number else "lower")
