"""A small deterministic environment family, as a user might bring one: walk along a corridor to its end."""

import time

from mopd.environments.base import EnvironmentFailure, Observation, Task


class Corridor:
    def __init__(self, family):
        self.family, self.task, self.at, self.closed = family, None, 0, False

    def reset(self, task: Task, *, expert: bool = False) -> Observation:
        self.task, self.at = task, 0
        self.family.trouble(task, "reset")
        return Observation(f"place 0 of {task.seed}", instruction="walk to the end.")

    def step(self, action: str) -> Observation:
        self.family.trouble(self.task, "step")
        malformed = action not in ("forward", "back")
        if not malformed:
            self.at = max(0, self.at + (1 if action == "forward" else -1))
        done = self.at >= self.task.seed
        text = f"{'unknown. ' if malformed else ''}place {self.at} of {self.task.seed} <|end|>"
        return Observation(text, score=self.at / self.task.seed, done=done, success=done, malformed=malformed)

    def expert_action(self):
        return "forward"

    def close(self):
        self.closed = True


class CorridorFamily:
    """failures: (task seed, "reset" or "step") → how many of its next calls fail; with "crash" a step raises TypeError.
    delays: task seed → seconds that every call takes."""

    name, version, system_prompt = "corridor", "1", "Say forward or back."

    def __init__(self, failures=None, delays=None):
        self.failures, self.delays, self.made = dict(failures or {}), dict(delays or {}), []

    def trouble(self, task, where):
        time.sleep(self.delays.get(task.seed, 0))
        for kind in (where, "crash"):
            if kind == "crash" and where == "reset":
                continue
            if self.failures.get((task.seed, kind), 0) > 0:
                self.failures[task.seed, kind] -= 1
                raise TypeError("a bug") if kind == "crash" else EnvironmentFailure("lost_process", f"{where} failed")

    def tasks(self, split):
        return [Task("walk", length, split) for length in range(1, 9)]

    def create(self):
        self.made.append(Corridor(self))
        return self.made[-1]

    def close(self):
        for one in self.made:
            one.close()
