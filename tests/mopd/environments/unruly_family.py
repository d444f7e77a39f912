"""A small counting environment, as a user might bring one, that misbehaves when it is told to."""

import os
import re
import subprocess
import sys
import time

from mopd.environments.base import EnvironmentFailure, Observation, Task


class Unruly:
    def __init__(self, family):
        if family.trouble == "create":
            raise ValueError("no such world: atlantis")
        self.family, self.count, self.task, self.child = family, 0, None, None

    def reset(self, task, *, expert=False):
        self.task, self.count = task, 0
        if task.name == "slow":
            time.sleep(60)
        return self.see()

    def step(self, action):
        if action == "hang":
            time.sleep(60)
        elif action == "hold":  # the interpreter, so that no other thread of the process runs
            re.match(r"(a+)+$", "a" * 40 + "b")
        elif action == "exit":
            os._exit(7)
        elif action == "flood":
            for _ in range(2000):
                print("x" * 1000)
            sys.stdout.flush()
            os.write(2, b"y" * 1_000_000)
        elif action == "start":  # a process of a process group of its own that does not end by itself
            self.child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], process_group=0)
        elif action == "grow":
            self.family.kept = bytearray(150 * 2**20)
        elif action == "fail":
            raise EnvironmentFailure("lost_game", "the game is gone")
        elif action == "bug":
            raise TypeError("a bug")
        elif action == "own":
            raise OwnError("mine")
        elif action == "secret":
            return Observation("x", info={"thread": __import__("threading").Lock()})
        self.count += 1
        return self.see()

    def see(self):
        child = self.child.pid if self.child else 0
        return Observation(f"{self.task.name} {self.count}", info={"pid": os.getpid(), "child": child},
                           done=self.count >= self.task.seed)

    def expert_action(self):
        return f"go {self.count}"

    def possible_actions(self):
        return ["go", "stay"]

    def close(self):
        self.closed = True


class OwnError(Exception):
    pass


class UnrulyFamily:
    name, version, system_prompt = "unruly", "3", "Count."

    def __init__(self, *, trouble: str = "", limit: int = 5):
        self.trouble = trouble
        if trouble == "start":
            raise ValueError("unruly: trouble starts")
        if trouble == "exit":
            print("cannot find the world map", file=sys.stderr, flush=True)
            os._exit(3)
        self.limit = limit

    def tasks(self, split):
        return [Task("count", self.limit, split)]

    def create(self):
        return Unruly(self)

    def close(self):
        pass
