"""Where a run's samples come from: sampled in turn with training (overlap 0), or by samplers that run ahead of it.

Both give the next step's plan and samples, take new weights and what a step measured, and save themselves. The loop of
`mopd.run` knows no difference.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from mopd.check import Launch
from mopd.config import Config
from mopd.learner.engine import Learner
from mopd.learner.weights import named_weights
from mopd.ranks import Ranks
from mopd.rows import Row
from mopd.sampling.advantages import GroupAdvantage
from mopd.sampling.assemble import Assembly
from mopd.sampling.coordinator import Coordinator
from mopd.sampling.engines import engine_faults
from mopd.sampling.failures import FailureLimit, refuse_failures
from mopd.sampling.point_draws import PointDraws
from mopd.sampling.sampler import Sampler, SamplerSpec
from mopd.sampling.samplers import Samplers
from mopd.sampling.sharing import row_from_plain, row_to_plain
from mopd.sampling.streams import StepSamples, Streams
from mopd.sampling.sync import WeightFolder, hand_over, publish, verify_now, weights_root
from mopd.sampling.vllm_weights import device_transfer
from mopd.schedule import Plan, Schedule, kl_by_stream, mixer_of
from mopd.signals import BrokenOff


class Source(Protocol):
    """What gives a run its samples. On several ranks every one calls every method, in the same order.

    totals   sampled_tokens, environment_steps and failures so far
    """

    totals: Counter

    def begin(self, state: Mapping[str, Any]) -> None:
        """Start with the learner's weights as they are; `state`: of a checkpoint, {} for a new run."""

    def listen(self, ended: Callable[[list[Row]], None], may_break: Callable[[], contextlib.AbstractContextManager]) -> None:
        """`ended` is told every sequence's rows as soon as it has ended, `may_break` makes the context in which waiting or
        sampling may be broken off (mopd.signals.Stop)."""

    def take(self, step: int) -> tuple[Plan, StepSamples, dict[str, Any]]:
        """The plan and the samples of step `step`, and what is to be recorded of the sampling: waited_s (seconds in which
        training stood still) and more. Raises BrokenOff on all ranks where one was told to break off, TooManyFailures."""

    def hand_over(self) -> dict[str, Any]:
        """Give the learner's weights to whoever samples; returns what is to be recorded of it."""

    def trained(self, plan: Plan, samples: StepSamples, report: Any) -> list[str]:
        """The step is trained; shares and draws follow what it measured. Returns sentences for the log."""

    def put_back(self) -> None:
        """The run ends without training what was taken, or while something was being taken: it counts as not taken."""

    def state_dict(self) -> dict[str, Any]:
        """As JSON values, after `trained` or `put_back`; the same on every rank or None where rank 0 alone knows."""

    def counts(self) -> dict[str, Any]:
        """What went wrong so far while this process, or samplers of its, sampled, also where another try mended it:
        `environments` {domain: see Domain.counts}, `engine` {reason: number}, `again` {what was done again: number}."""

    def summary(self) -> str:
        """What was sampled so far, in words."""

    def close(self) -> None:
        """End what was started; safe to call twice."""


class OnPolicy:
    """Every step samples with the weights that the step before it made; a run is a function of its config and seed."""

    def __init__(self, config: Config, learner: Learner, streams: Streams, ranks: Ranks, folder: Path | None = None):
        self.config, self.learner, self.streams, self.ranks = config, learner, streams, ranks
        # vLLM takes weights from a folder, also at the start: servers may hold those of another run.
        self.transfer = device_transfer(config, learner, ranks)  # between GPUs, without a folder; None: none
        self.through_folder = getattr(streams.engine, "takes", "weights") == "folder" and self.transfer is None
        self.place = WeightFolder(weights_root(config.sampling.weights_folder, folder)) \
            if self.through_folder and ranks.first else None
        self.schedule = Schedule(config)
        self.first = True
        self.plan: Plan | None = None
        self._following: Plan | None = None
        self._standing: tuple[dict, Counter] | None = None

    @property
    def totals(self) -> Counter:
        return self.streams.totals

    def begin(self, state: Mapping[str, Any]) -> None:
        if state:
            self.schedule.load_state_dict(state["schedule"])
            self.streams.load_state_dict(state["streams"])
            self.plan = Plan(**state["plan"])
        else:
            self.plan = self.schedule.next()
        if self.through_folder or self.transfer is not None:
            self.hand_over()
        elif state:
            self.streams.engine.load_weights(named_weights(self.learner), version=self.learner.step)

    def listen(self, ended, may_break) -> None:
        self.streams.ended, self.streams.may_break = ended, may_break

    def take(self, step: int) -> tuple[Plan, StepSamples, dict[str, Any]]:
        began = time.perf_counter()
        self._standing = self.schedule.state_dict(), Counter(self.totals)
        samples = self.streams.sample(self.plan)
        self._following = self.schedule.next()
        self.streams.prefetch(self._following)  # its environments start while the learner works
        refuse_failures(self.config, step, samples)
        getattr(self.streams.engine, "sleep", lambda: None)()  # its device's memory is the learner's until new weights come
        return self.plan, samples, {"waited_s": time.perf_counter() - began}

    def hand_over(self) -> dict[str, Any]:
        version = self.learner.step
        verify = verify_now(self.config.sampling.verify_every, version, first=self.first)
        self.first = False
        getattr(self.streams.engine, "wake", lambda: None)()
        return hand_over(self.learner, self.streams.engine, version, ranks=self.ranks, place=self.place,
                         verify=verify, transfer=self.transfer).record()

    def trained(self, plan: Plan, samples: StepSamples, report: Any) -> list[str]:
        notes = self.schedule.observe(report.reverse_kl, kl_by_stream(report.metrics["streams"]))
        self.streams.observe(plan.step, samples, report.turn_scores)
        self.plan = self._following
        return notes

    def put_back(self) -> None:
        self.schedule.load_state_dict(self._standing[0])
        self.streams.totals = self._standing[1]

    def state_dict(self) -> dict[str, Any]:
        return {"schedule": self.schedule.state_dict(), "streams": self.streams.state_dict(), "plan": self.plan.to_json()}

    def counts(self) -> dict[str, Any]:
        return {"environments": {name: domain.counts() for name, domain in self.streams.domains.items()},
                "engine": engine_faults(getattr(self.streams.engine, "stats", {}))}

    def summary(self) -> str:
        return self.streams.summary()

    def close(self) -> None:
        getattr(self.streams.engine, "close", lambda: None)()
        if self.place is not None:
            self.place.close()


class Ahead:
    """Samplers, processes of their own, sample while the learner trains (`sampling.overlap` ≥ 1). Rank 0 coordinates them;
    every rank has all rows of a step.

    folder      of the run: samplers write their logs there, and accounts.json says what became of every launched group
    advantage   a group's rewards → its outcome advantages
    """

    def __init__(self, config: Config, launch: Launch, learner: Learner, folder: Path, ranks: Ranks, *,
                 advantage: GroupAdvantage | None = None):
        self.config, self.learner, self.ranks, self.folder = config, learner, ranks, folder
        self.totals: Counter = Counter()
        self.first = True
        self.place: WeightFolder | None = None
        self.coordinator: Coordinator | None = None
        self._ended: Callable[[list[Row]], None] = lambda rows: None
        self._layout = "module" if config.sampling.engine == "hf" else "checkpoint"
        if not ranks.first:
            return
        train, sampling = config.train, config.sampling
        self.place = WeightFolder(weights_root(sampling.weights_folder, folder))
        version = None if launch.store is None else launch.store.version

        def make(number: int, weights: Path | None, version_of: int) -> Sampler:
            return Sampler(SamplerSpec(config, number, folder / f"sampler-{number}.log", weights, version_of, version))

        samplers = Samplers(make, sampling.samplers, place=self.place, restarts=sampling.sampler_restarts)
        alpha = train.objective == "mopd" and bool(train.objective_options.get("alpha"))
        self.coordinator = Coordinator(
            mixer_of(config), samplers, Assembly(store=launch.store, demonstration=train.demonstration_fraction),
            draws=None if launch.selector is None else PointDraws(launch.selector), fresh_turns=train.fresh_turns,
            advantage=advantage if train.group_size > 1 else None, needs_spread=alpha,
            limit=FailureLimit(train.max_infra_failure_share), engine_wait_s=sampling.engine_wait_s,
            moving=sampling.drift.enabled)

    def begin(self, state: Mapping[str, Any]) -> None:
        if self.ranks.first and state:
            self.coordinator.load_state_dict(state["coordinator"])
        if state:
            self.totals = Counter(state["totals"])
        made = self._publish()
        if self.ranks.first:
            self.coordinator.start(made.path, made.version)

    def listen(self, ended, may_break) -> None:
        if self.ranks.first:
            self.coordinator.ended, self.coordinator.may_break = ended, may_break
            self._ended = ended

    def take(self, step: int) -> tuple[Plan, StepSamples, dict[str, Any]]:
        taken: list[Any] = []

        def take() -> bool:
            if self.ranks.first:
                try:
                    taken.extend(self.coordinator.take(step))
                except BrokenOff:
                    return True
                refuse_failures(self.config, step, taken[1])
            return False

        if any(self.ranks.gather(self.ranks.together("sampling", take))):
            raise BrokenOff
        if self.ranks.size > 1:
            told = self.ranks.gather([taken[0].to_json(), [row_to_plain(row) for row in taken[1].rows],
                                      dict(self.coordinator.totals)] if self.ranks.first else None)[0]
            if self.ranks.first:
                self._ended(taken[1].rows)  # what this rank has asked the teachers is what it tells the others
            else:
                taken = [Plan(**told[0]), StepSamples([row_from_plain(row) for row in told[1]], []), {}]
            self.totals = Counter(told[2])
        else:
            self.totals = Counter(self.coordinator.totals)
        return tuple(taken)

    def hand_over(self) -> dict[str, Any]:
        made = self._publish()
        if self.ranks.first:
            self.coordinator.take_weights(made.path, made.version)
        return {"version": made.version, "seconds": made.seconds, "bytes": made.bytes}

    def _publish(self):
        version = self.learner.step
        verify = verify_now(self.config.sampling.verify_every, version, first=self.first)
        self.first = False
        return publish(self.learner, self.place, version, ranks=self.ranks, layout=self._layout, verify=verify)

    def trained(self, plan: Plan, samples: StepSamples, report: Any) -> list[str]:
        if not self.ranks.first:
            return []
        return self.coordinator.trained(plan, samples, report.turn_scores, report.reverse_kl,
                                        kl_by_stream(report.metrics["streams"]))

    def put_back(self) -> None:
        if self.ranks.first:
            self.coordinator.put_back()

    def state_dict(self) -> dict[str, Any]:
        return {"coordinator": self.coordinator.state_dict() if self.ranks.first else None, "totals": dict(self.totals)}

    def counts(self) -> dict[str, Any]:
        return self.coordinator.samplers.counts() if self.ranks.first else {}

    def summary(self) -> str:
        return self.coordinator.summary()

    def close(self) -> None:
        if self.coordinator is not None:
            self.coordinator.close()
            (self.folder / "accounts.json").write_text(json.dumps(self.coordinator.accounts(), indent=1))
        if self.place is not None:
            self.place.close()
