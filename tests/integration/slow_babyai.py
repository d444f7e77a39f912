"""BabyAI whose every step takes `pause` seconds longer, for tests and measurements of slow domains."""

from __future__ import annotations

import time

from mopd.environments.babyai import BabyAIEnvironment, BabyAIFamily


class SlowEnvironment(BabyAIEnvironment):
    pause = 0.0

    def step(self, action):
        time.sleep(self.pause)
        return super().step(action)


class SlowFamily(BabyAIFamily):
    def __init__(self, *, pause: float, **options):
        super().__init__(**options)
        self.pause = pause

    def create(self):
        environment = super().create()
        environment.__class__ = type("SlowEnvironment", (SlowEnvironment,), {"pause": self.pause})
        return environment


def family(*, pause: float = 0.1, sizes=None):
    return SlowFamily(pause=pause, sizes=sizes)
