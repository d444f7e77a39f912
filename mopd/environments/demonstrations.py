"""Experts and novices play; their episodes become transcripts (plain dictionaries, one JSON line each).

Text only: rendering and tokenising is done elsewhere. Episodes that cannot be kept are counted with the reason.
"""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import json
import os
import random
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from mopd.environments.base import SPLITS, EnvironmentFailure, EnvironmentFamily, Task
from mopd.environments.pool import EnvironmentPool

Transcript = dict[str, Any]


class InvalidTranscript(ValueError):
    """A transcript breaks the schema; the message names the file, the line and the field."""


@dataclasses.dataclass
class Demonstrations:
    """transcripts in the order of the tasks; `counts` says what became of every task: `kept`, and why others were not:
    `unsuccessful`, `turn_limit`, `expert_stuck`, `no_action` or `infra:<category>`; `examples` has a task for each."""

    transcripts: list[Transcript]
    counts: dict[str, int]
    examples: dict[str, str]
    environment_steps: int
    environment_seconds: float


def demonstrate(
    family: EnvironmentFamily,
    domain: str,
    tasks: Sequence[Task],
    *,
    seed: int,
    random_share: float = 0.0,
    expert: bool = True,
    max_turns: int = 64,
    keep: str = "success",
    workers: int = 2,
    source_id: str = "",
    progress: Callable[[int, int], None] | None = None,
) -> Demonstrations:
    """Play each task once and write down what happened.

    seed           decides the random actions, together with the task; the same inputs give the same transcripts
    random_share   probability that a turn plays a random admissible action instead of the expert's (a novice, for
                   pre-training text); each turn's `writer` is "expert" or "random"
    expert         False: random actions only
    max_turns      an episode ends after so many actions
    keep           "success" keeps only episodes that succeed, "all" every one that was played to an end or a limit
    workers        threads that play beside each other
    progress       called with (episodes finished, episodes in all)

    Raises ValueError for wrong arguments; failures of environments are retried by the pool, then counted.
    """
    if keep not in ("success", "all"):
        raise ValueError(f"keep is {keep!r}; it must be success or all")
    if not 0.0 <= random_share <= 1.0:
        raise ValueError(f"random_share is {random_share}; it must lie in [0, 1]")
    if max_turns < 1:
        raise ValueError(f"max_turns is {max_turns}; it must be at least 1")
    source = {"kind": "expert", "id": source_id or f"{family.name}-expert", "revision": family.version}
    counts: collections.Counter[str] = collections.Counter()
    examples: dict[str, str] = {}
    transcripts: list[Transcript] = []
    with (
        EnvironmentPool(family, size=workers, workers=1) as pool,
        concurrent.futures.ThreadPoolExecutor(workers) as executor,
    ):

        def play(task: Task) -> tuple[Transcript | None, str]:
            return _play(pool, domain, task, source, seed, random_share, expert, max_turns)

        for done, (task, (transcript, ending)) in enumerate(zip(tasks, executor.map(play, tasks), strict=True), 1):
            usable = transcript is not None and (keep == "all" or transcript["success"])
            reason = "kept" if usable else ending
            counts[reason] += 1
            if usable:
                transcripts.append(transcript)
            else:
                examples.setdefault(reason, f"{task.name} {task.split} {task.seed}")
            if progress is not None:
                progress(done, len(tasks))
        return Demonstrations(transcripts, dict(sorted(counts.items())), examples, pool.stats.steps, pool.stats.seconds)


def _play(
    pool: EnvironmentPool,
    domain: str,
    task: Task,
    source: dict[str, str],
    seed: int,
    random_share: float,
    expert: bool,
    max_turns: int,
) -> tuple[Transcript | None, str]:
    """One episode: (transcript or None, how it ended)."""
    draws = random.Random(f"{seed}/{task.name}/{task.split}/{task.seed}")
    try:
        environment, observation = pool.acquire(task, expert=expert)
    except EnvironmentFailure as failure:
        return None, f"infra:{failure.category}"
    ending, turns, instruction = "turn_limit", [], observation.instruction
    try:
        for _ in range(max_turns):
            # The draw comes first and always, so that an expert's dead end does not shift later draws.
            dice = draws.random()
            action, writer = None, "random"
            if expert:
                action, writer = environment.expert_action(), "expert"
            if action is None and expert and random_share == 0.0:
                ending = "expert_stuck"
                break
            if action is None or dice < random_share:
                listed = observation.admissible
                choices = listed if listed is not None else environment.possible_actions()
                if choices:
                    action, writer = choices[draws.randrange(len(choices))], "random"
            if action is None:
                ending = "no_action"
                break
            before, observation = observation, environment.step(action)
            turns.append({"observation": before.text, "action": action, "score": observation.score, "writer": writer})
            if observation.done:
                ending = "unsuccessful"
                break
    except EnvironmentFailure as failure:
        return None, f"infra:{failure.category}"
    finally:
        pool.release(environment)
    if not turns:
        return None, ending
    return {
        "domain": domain,
        "environment": pool.family.name,
        "environment_version": pool.family.version,
        "task": task.name,
        "seed": task.seed,
        "split": task.split,
        "source": source,
        "system": pool.family.system_prompt,
        "instruction": instruction,
        "turns": turns,
        "final_observation": observation.text,
        "score": observation.score,
        "success": observation.success,
        "metadata": {"ending": "done" if observation.done else ending, "random_share": random_share},
    }, ending


def write_transcripts(path: str | os.PathLike[str], transcripts: Iterable[Transcript]) -> int:
    """Write JSON lines, whole or not at all; returns their number. Raises InvalidTranscript."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    count = 0
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=path.parent, prefix=path.name, delete=False) as file:
        try:
            for count, transcript in enumerate(transcripts, 1):
                check_transcript(transcript, f"transcript {count}")
                file.write(json.dumps(transcript, ensure_ascii=False) + "\n")
        except BaseException:
            os.unlink(file.name)
            raise
    os.chmod(file.name, 0o666 & ~_umask())
    os.replace(file.name, path)
    return count


def _umask() -> int:
    mask = os.umask(0o022)
    os.umask(mask)
    return mask


def read_transcripts(path: str | os.PathLike[str]) -> Iterator[Transcript]:
    """Read and check JSON lines. Raises InvalidTranscript with file and line, FileNotFoundError."""
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            place = f"{os.fspath(path)}:{number}"
            try:
                transcript = json.loads(line.decode())
            except ValueError as error:  # no JSON, or no UTF-8
                raise InvalidTranscript(f"{place}: not JSON ({error})") from error
            check_transcript(transcript, place)
            yield transcript


_FIELDS: dict[str, type | tuple[type, ...]] = {
    "domain": str,
    "environment": str,
    "environment_version": str,
    "task": str,
    "seed": int,
    "split": str,
    "source": dict,
    "system": str,
    "instruction": str,
    "turns": list,
    "final_observation": str,
    "score": (int, float),
    "success": bool,
    "metadata": dict,
}
_TURN_FIELDS: dict[str, type | tuple[type, ...]] = {
    "observation": str,
    "action": str,
    "score": (int, float),
    "writer": str,
}
_WRITERS = ("expert", "random")


def check_transcript(transcript: Any, place: str) -> None:
    """Raise InvalidTranscript, naming `place` and the field, unless `transcript` follows the schema."""
    _check_fields(transcript, _FIELDS, place)
    if transcript["split"] not in SPLITS:
        raise InvalidTranscript(f"{place}: split is {transcript['split']!r}; it must be one of {', '.join(SPLITS)}")
    _check_fields(transcript["source"], {"kind": str, "id": str, "revision": str}, f"{place}: source")
    if not transcript["turns"]:
        raise InvalidTranscript(f"{place}: turns is empty")
    for index, turn in enumerate(transcript["turns"]):
        _check_fields(turn, _TURN_FIELDS, f"{place}: turns[{index}]")
        if turn["writer"] not in _WRITERS:
            raise InvalidTranscript(
                f"{place}: turns[{index}].writer is {turn['writer']!r}; it must be one of {', '.join(_WRITERS)}"
            )


def _check_fields(record: Any, fields: dict[str, type | tuple[type, ...]], place: str) -> None:
    if not isinstance(record, dict):
        raise InvalidTranscript(f"{place}: expected an object, found {type(record).__name__}")
    for name, kind in fields.items():
        if name not in record:
            raise InvalidTranscript(f"{place}: field {name!r} is missing")
        value = record[name]
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise InvalidTranscript(f"{place}: field {name!r} is a {type(value).__name__}")
