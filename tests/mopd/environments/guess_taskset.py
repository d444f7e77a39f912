"""A taskset for verifiers with an environment of its own: guess a number, told higher or lower, three words at most."""

import verifiers.v1 as vf

__all__ = ["GuessEnv", "Guesses"]


class GuessData(vf.TaskData):
    number: int


class Guess(vf.Task[GuessData]):
    @vf.stop
    async def enough(self, trace: vf.Trace):
        return trace.num_turns >= 3


class Guesses(vf.Taskset[Guess]):
    INFINITE = True

    def load(self):
        number = 0
        while True:
            yield Guess(GuessData(prompt="Guess a number below 10.", number=number % 10, name="guess"), self.config.task)
            number += 1


class GuessEnvConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()


class GuessEnv(vf.Env[GuessEnvConfig]):
    async def run(self, task, agents):
        won = False
        async with agents.player.interaction(task) as talk:
            segment = await talk.turn()
            while not segment.terminated:
                said = int(segment.last_reply)
                if said == task.data.number:
                    won = True
                    break
                segment = await talk.turn("higher" if said < task.data.number else "lower")
        talk.trace.record_reward("won", float(won), 1.0)
