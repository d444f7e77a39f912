"""The sampling engine of a teacher that vLLM runs, at its servers or in this process: token ids in, token ids out."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

from mopd.sampling.base import Completion, Request, SamplingOptions, stopped
from teachers.scoring.requests import TeacherError
from teachers.scoring.turns import Turn, turns_of


class Writer(Protocol):
    """A ScoringBackend that also writes: teachers.scoring.vllm_server.VLLMServers or vllm_local.VLLMLocal."""

    teacher: str
    max_tokens: int | None

    def write(self, turns: list[Turn]) -> list[Completion | str]:
        """Completions in the order asked, or the reasons why there is none; TeacherUnreachable where nothing answers."""

    def close(self) -> None: ...


class VLLMEngine:
    """A SamplingEngine over a Writer.

    max_batch   rows that are asked for together; how many of them a server takes at once is the writer's business
    version     written with every token: a teacher's weights stay what they are

    Log-probabilities are those of the policy that sampled, at its temperature (at temperature 0 the model's own at
    temperature 1, as every engine here gives them). A request's draws come from its seed alone; vLLM repeats them for the
    same seed as far as its logits are the same, and these may differ by rounding with what else is in its batch.
    """

    tells_ends = False
    version = 0

    def __init__(self, writer: Writer, *, max_batch: int = 64):
        self.writer, self.max_batch = writer, max_batch

    @property
    def max_positions(self) -> int | None:
        """Tokens of the longest context with what is written behind it, once the writer knows it."""
        return None if self.writer.max_tokens is None else self.writer.max_tokens + 1

    def generate(self, requests: list[Request], options: SamplingOptions) -> list[Completion]:
        """One turn for each request, in their order.

        Raises ValueError for what vLLM cannot do (see turns_of), TeacherUnreachable where no server answers, TeacherError
        where one answers with something that is no turn, after all retries."""
        turns = turns_of(requests, options, teacher=self.writer.teacher)
        found: list[Completion] = []
        for number, answer in enumerate(self.writer.write(turns) if turns else []):
            if isinstance(answer, str):
                raise TeacherError(f"teacher {self.writer.teacher!r} wrote no turn for request {number} (session "
                                   f"{requests[number].session!r}): {answer}")
            found.append(stopped(answer, options.stop_strings))
        return found

    def end_sessions(self, sessions: Iterable[str]) -> None:
        """Nothing to do: vLLM finds known prefixes by itself, and drops them when it needs the room."""

    def load_weights(self, weights: Iterable[tuple[str, Any]], version: int) -> None:
        """Raises TeacherError: a teacher never changes."""
        raise TeacherError(f"teacher {self.writer.teacher!r}: a teacher's weights are never replaced")

    def close(self) -> None:
        """End requests under way and give back what the writer holds."""
        self.writer.close()

