"""When environments fail so often that a run stops, instead of training on what is left."""

from __future__ import annotations

from collections import Counter, defaultdict

from mopd.config import Config
from mopd.sampling.streams import StepSamples
from mopd.sampling.work import GaveUp, Work
from mopd.sampling.works import source_of


class TooManyFailures(RuntimeError):
    """Infrastructure failures took more of a step than `train.max_infra_failure_share` allows."""


def refuse_failures(config: Config, step: int, samples: StepSamples) -> None:
    """Stop where the environments are down, instead of training on what is left: raise TooManyFailures where too large a
    share of a step's played sequences failed for reasons of infrastructure."""
    failed = sum(sum(counts.values()) for counts in samples.failures.values())
    played = samples.episodes + samples.resumed
    if played and failed > config.train.max_infra_failure_share * len(played):
        what = "rollouts and resumed sequences" if samples.resumed else "rollouts"
        raise _too_many(f"step {step}", failed, len(played), what, samples.failures,
                        next(e.failure_text for e in played if e.failure))


class FailureLimit:
    """The same for a run whose steps wait until their batch is whole: where every environment is down none ever is.

    Since the last batch more failed than `share` of what was played, or of a step's rollouts where fewer were played.
    """

    def __init__(self, share: float):
        self.share, self.expected = share, 1
        self._played, self._failed = 0, 0
        self._reasons: dict[str, Counter[str]] = defaultdict(Counter)

    def begin(self, expected: int) -> None:
        """A step's batch is whole; the next has `expected` rollouts."""
        self.expected, self._played, self._failed = max(expected, 1), 0, 0
        self._reasons.clear()

    def played(self, work: Work) -> None:
        """A sequence was played to its end."""
        self._played += 1

    def failed(self, work: Work, news: GaveUp) -> None:
        """A sequence was given up. Raises TooManyFailures."""
        self._played, self._failed = self._played + 1, self._failed + 1
        self._reasons[source_of(work.group)[0]][news.reason] += 1
        if self._failed > self.share * max(self._played, self.expected):
            raise _too_many("while sampling", self._failed, self._played, "sequences", self._reasons, news.words)


def _too_many(when: str, failed: int, played: int, what: str, reasons, words: str) -> TooManyFailures:
    said = "; ".join(f"{name}: {dict(counts)}" for name, counts in reasons.items())
    return TooManyFailures(
        f"{when}: {failed} of {played} {what} failed for reasons of infrastructure ({said}); the first said: {words}. Mend "
        "the environment and run the same command again: it goes on from the last checkpoint. "
        "train.max_infra_failure_share sets the limit")
