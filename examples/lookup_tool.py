"""A verifiers taskset with a tool: the answer is in a table that only the tool reads.

data: {train: {verifiers: lookup_tool}}
workflow: {name: verifiers}
inference: {a: {endpoint: {port: 0}}}
"""

import verifiers.v1 as vf

__all__ = ["LookupTaskset"]

TABLE = {"ant": 12, "bee": 47, "cat": 30, "dog": 85}


class Table(vf.Toolset[vf.SharedToolsetConfig]):
    @vf.tool
    def look_up(self, word: str) -> str:
        """The number of a word."""
        return str(TABLE.get(word, f"there is no {word!r}"))


class LookupData(vf.TaskData):
    answer: str


class LookupTask(vf.Task[LookupData]):
    @vf.reward
    async def right(self, trace) -> float:
        return float(self.data.answer in (trace.last_message.content or ""))


class LookupTaskset(vf.Taskset[LookupTask, vf.TasksetConfig]):
    def load(self):
        for word, number in TABLE.items():
            data = LookupData(id=word, answer=str(number), prompt=f"Which number has {word}?")
            yield LookupTask(data, self.config.task)

    @classmethod
    def toolsets(cls, config):
        return [Table(vf.SharedToolsetConfig())]


if __name__ == "__main__":  # how the package starts the server of the tools
    Table.run()
