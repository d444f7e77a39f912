"""A real OpenEnv server of a small environment: `python guess_server.py PORT SESSIONS`."""

import random
import sys

import uvicorn
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class Guess(Action):
    number: int


class Told(Observation):
    text: str = ""


class GuessEnvironment(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self.number, self.steps = 0, 0

    def reset(self, seed=None, episode_id=None, below=10, **_):
        self.number, self.steps = random.Random(seed).randrange(below), 0
        return Told(text=f"guess a number below {below}", done=False, reward=0.0)

    def step(self, action, **_):
        self.steps += 1
        if action.number == 99:
            raise RuntimeError("the box fell over")
        right = action.number == self.number
        text = "yes" if right else "higher" if action.number < self.number else "lower"
        return Told(text=text, done=right or self.steps >= 6, reward=1.0 if right else 0.0)

    @property
    def state(self):
        return State(step_count=self.steps)


if __name__ == "__main__":
    app = create_fastapi_app(GuessEnvironment, Guess, Told, max_concurrent_envs=int(sys.argv[2]))
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
