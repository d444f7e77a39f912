"""A taskset for verifiers, as a user might bring one: sums, one reply each."""

import verifiers.v1 as vf

__all__ = ["Sums"]


class SumData(vf.TaskData):
    answer: str


class SumsConfig(vf.TasksetConfig):
    count: int = 30
    first: int = 0


class Sum(vf.Task[SumData]):
    @vf.reward
    async def right(self, trace):
        return float(trace.last_reply == self.data.answer)

    @vf.reward(weight=0.5)
    async def short(self, trace):
        return 1.0 if len(trace.last_reply) < 4 else 0.0


class Sums(vf.Taskset[Sum, SumsConfig]):
    def load(self):
        for n in range(self.config.first, self.config.first + self.config.count):
            yield Sum(SumData(prompt=f"{n} + 1 =", answer=str(n + 1), system_prompt="Sum."), self.config.task)
