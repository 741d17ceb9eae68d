"""A workflow: after a wrong answer the policy may try again, for less reward.

workflow: {name: "workflow:Retry", settings: {reward: "reward:exact_match", attempts: 3}}
"""

import rollmill


class Retry(rollmill.Workflow):
    class Settings(rollmill.WorkflowSettings):
        attempts: int = 2
        discount: float = 0.5

    async def run(self, task: rollmill.Task, context: rollmill.WorkflowContext) -> rollmill.Outcome:
        chat = self.converse(task, context)
        for attempt in range(1, self.settings.attempts + 1):
            await chat.respond()
            reward = await chat.grade() * self.settings.discount ** (attempt - 1)
            if reward > 0 or not chat.say("That is not right. Try again."):
                break
        return chat.outcome(reward, attempts=attempt)
