"""Single-turn tasks from files of one's own: one JSON object per line with a prompt and an answer, and a checker."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mopd.environments.base import SPLITS, Task
from mopd.environments.single_turn import Question, SingleTurnEnvironment, named, require_split

SHARES = {"train": 0.8, "development": 0.1, "test": 0.1}
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?(?:[eE]-?\d+)?(?:/\d+)?")


class JsonlTasksFamily:
    """Rows of JSONL files.

    file        a file, or split → file. In a single file a row's own `split` decides; where it has none, the hash of its
                prompt, by `shares`: the same prompt is in the same split whatever else is in the file
    checker     `exact` (equal but for blanks and case), `number` (the last number of both is equal), `contains` (the answer
                stands in the reply), or a dotted path to (reply, row) → score in [0, 1], a bool among these
    prompt      key of the prompt in a row; a row's `task` (if it has one) groups tasks of a kind
    answer      key of the answer; the expert gives it
    success_at  a score of at least this is a success
    """

    def __init__(self, *, file: str | Mapping[str, str], checker: str = "exact", prompt: str = "prompt",
                 answer: str = "answer", system_prompt: str = "Give the answer alone.",
                 shares: Mapping[str, float] | None = None, success_at: float = 1.0):
        self._check: Callable[[str, Mapping[str, Any]], float]
        if checker in CHECKERS:
            built_in = CHECKERS[checker]
            self._check = lambda said, row: built_in(said, str(row[answer]))
        else:
            self._check = named("jsonl_tasks: checker", checker)
            if not callable(self._check):
                raise ValueError(f"jsonl_tasks: checker {checker!r} cannot be called")
        self._prompt, self._answer, self._success_at = prompt, answer, success_at
        self._shares = dict(SHARES if shares is None else shares)
        if set(self._shares) - set(SPLITS) or not sum(self._shares.values()) > 0 or min(self._shares.values()) < 0:
            raise ValueError(f"jsonl_tasks: shares are {self._shares}; they give numbers of at least 0 to "
                             f"{', '.join(SPLITS)}")
        files = dict(file) if isinstance(file, Mapping) else {"": file}
        for split in files:
            if split and split not in SPLITS:
                raise ValueError(f"jsonl_tasks: `file` names the split {split!r}; splits are {', '.join(SPLITS)}")
        self._rows: dict[str, list[dict[str, Any]]] = {split: [] for split in SPLITS}
        digest = hashlib.sha256()
        for split, path in files.items():
            data = self._read(path)
            digest.update(data)
            self._take(path, data, split, needs_answer=checker in CHECKERS)
        if not any(self._rows.values()):
            raise ValueError(f"jsonl_tasks: no row in {', '.join(map(str, files.values()))}")
        self.name = "jsonl_tasks"
        self.version = f"rows {digest.hexdigest()[:12]}, checker {checker}"
        self.system_prompt = system_prompt

    def tasks(self, split: str) -> list[Task]:
        require_split(split)
        return [Task(str(row.get("task", "question")), number, split) for number, row in enumerate(self._rows[split])]

    def create(self) -> SingleTurnEnvironment:
        return SingleTurnEnvironment(self._ask, success_at=self._success_at)

    def close(self) -> None:
        """Nothing is held."""

    def _ask(self, task: Task) -> Question:
        rows = self._rows[task.split]
        if not 0 <= task.seed < len(rows):
            raise ValueError(f"jsonl_tasks: there is no row {task.seed} of split {task.split}, which has {len(rows)}")
        row = rows[task.seed]
        answer = row.get(self._answer)
        return Question(row[self._prompt], lambda said: self._check(said, row), None if answer is None else str(answer))

    @staticmethod
    def _read(path: str) -> bytes:
        try:
            return Path(path).read_bytes()
        except OSError as error:
            raise ValueError(f"jsonl_tasks: file {path} cannot be read: {error.strerror or error}") from error

    def _take(self, path: str, data: bytes, split: str, *, needs_answer: bool) -> None:
        for number, line in enumerate(data.decode("utf-8", "replace").splitlines(), 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                raise ValueError(f"jsonl_tasks: {path}, line {number}: not JSON: {error}") from error
            keys = (self._prompt, *([self._answer] if needs_answer else []))
            missing = [key for key in keys if not isinstance(row, dict) or row.get(key) is None]
            if missing or not isinstance(row[self._prompt], str):
                key = missing[0] if missing else self._prompt
                raise ValueError(f"jsonl_tasks: {path}, line {number}: no text under {key!r}")
            own = split or str(row.get("split", "")) or self._split_of(row[self._prompt])
            if own not in SPLITS:
                raise ValueError(f"jsonl_tasks: {path}, line {number}: split is {own!r}; splits are {', '.join(SPLITS)}")
            self._rows[own].append(row)

    def _split_of(self, prompt: str) -> str:
        point = int.from_bytes(hashlib.sha256(prompt.encode("utf-8", "surrogatepass")).digest()[:6], "big") / 2**48
        point *= sum(self._shares.values())
        for split, share in self._shares.items():
            point -= share
            if point < 0:
                return split
        return max(self._shares, key=lambda split: self._shares[split])


def exact(said: str, answer: str) -> float:
    """1 where both are equal but for blanks and case."""
    return float(" ".join(said.split()).casefold() == " ".join(answer.split()).casefold())


def contains(said: str, answer: str) -> float:
    """1 where the answer stands in the reply, blanks and case apart."""
    return float(" ".join(answer.split()).casefold() in " ".join(said.split()).casefold())


def number(said: str, answer: str) -> float:
    """1 where the last number of the reply is the last number of the answer; fractions and thousands separators are read."""
    found, wanted = _last_number(said), _last_number(answer)
    return float(found is not None and found == wanted)


def _last_number(text: str):
    from fractions import Fraction

    found = _NUMBER.findall(text)
    if not found:
        return None
    top, _, bottom = found[-1].replace(",", "").partition("/")
    try:
        return Fraction(top) / Fraction(bottom or 1)
    except ZeroDivisionError:
        return None


CHECKERS = {"exact": exact, "number": number, "contains": contains}
