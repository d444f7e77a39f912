"""`mopd simulate`: plan a cluster without one. Compares schedulers on a mix of sources, and sizes engines, environments and
teachers to a trainer's pace. docs/mixer.md has examples.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mopd.config import load_as, load_config, stream_shares
from mopd.mixer_machine import Mixer, MixerOptions, SourceOptions
from mopd.progress import Progress, human_seconds
from mopd.simulator import Cluster, Simulation, Simulator, bound_step_seconds
from mopd.simulator_clairvoyant import Clairvoyant
from mopd.simulator_plot import occupancy, plot, sparkline
from mopd.simulator_sizing import Try, bounds, little, size_cluster
from mopd.simulator_traces import SourceModel, Work, read_trace

SCHEDULERS = {"corrected": {}, "deficit": {"alpha": 0.0}, "target": {"alpha": 1.0}, "clairvoyant": None}
# mixer options that make each; "corrected" is the mixer as configured, "clairvoyant" knows all lengths beforehand


class NothingToSimulate(ValueError):
    """The configuration names no work."""


@dataclasses.dataclass
class GenerateConfig:
    """Sources with durations and lengths spread geometrically over a ratio, the lengths in an order of their own."""

    count: int = 0
    seconds: float = 1.0  # of the fastest source
    seconds_ratio: float = 66.0  # slowest over fastest
    tokens: float = 200.0  # of the shortest source
    tokens_ratio: float = 90.0
    spread: float = 0.8
    acceptance: list[float] = dataclasses.field(default_factory=lambda: [0.3, 1.0])  # drawn between these
    share: list[float] = dataclasses.field(default_factory=lambda: [0.5, 2.0])


@dataclasses.dataclass
class WorkConfig:
    """A domain's work: means of one sequence."""

    share: float = 1.0
    seconds: float = 10.0
    tokens: float = 1000.0
    turns: float = 1.0
    spread: float = 0.8  # standard deviation of the log of seconds and tokens
    acceptance: float = 1.0  # share of groups that may enter a batch
    group_size: int = 1
    prefix_fraction: float = 0.0  # share of its groups that write single turns from stored prefixes
    fresh_turns: int = 1
    environments: int | None = None  # most sequences that play at a time; none: any number


@dataclasses.dataclass
class ClusterConfig:
    engines: int = 4
    slots: int = 64  # sequences of one engine
    kv_tokens: float = 1e6  # KV memory of one engine
    tokens_per_second: float | None = None  # of one sequence, where a trace has no seconds (metrics.jsonl)
    teacher_servers: int = 0  # 0: scoring takes no time
    teacher_tokens_per_second: float = 50000.0  # of one server
    trainer_seconds: float = 0.0
    trainer_tokens_per_second: float = 0.0  # 0: a step takes trainer_seconds, whatever its length


@dataclasses.dataclass
class SizeConfig:
    enabled: bool = False
    idle_share: float = 0.05  # of the time that the trainer may wait
    steps: int = 60
    tries: int = 10


@dataclasses.dataclass
class SimulateConfig:
    seed: int = 1
    steps: int = 100
    groups_per_step: int = 128
    compare: list[str] = dataclasses.field(default_factory=lambda: list(SCHEDULERS))
    generate: GenerateConfig = dataclasses.field(default_factory=GenerateConfig)
    sources: dict[str, WorkConfig] = dataclasses.field(default_factory=dict)
    trace: str = ""  # JSONL of finished sequences, or a run's metrics.jsonl
    train_config: str = ""  # take domains, shares, streams and group sizes from this training configuration
    cluster: ClusterConfig = dataclasses.field(default_factory=ClusterConfig)
    mixer: dict[str, Any] = dataclasses.field(default_factory=dict)  # MixerOptions but groups_per_step
    size: SizeConfig = dataclasses.field(default_factory=SizeConfig)


@dataclasses.dataclass
class Scenario:
    """Everything that a simulation is made of."""

    shares: dict[str, float]
    streams: dict[str, dict[str, float]]
    options: MixerOptions
    sources: dict[str, SourceOptions]
    work: Work
    cluster: Cluster

    @property
    def target(self) -> dict[str, float]:
        """Groups of each source per step, on average."""
        total = math.fsum(self.shares.values())
        return {f"{d}/{s}": share / total * w / math.fsum(self.streams[d].values()) * self.options.groups_per_step
                for d, share in self.shares.items() for s, w in self.streams[d].items()}

    def scheduler(self, name: str, steps: int, cluster: Cluster | None = None) -> Mixer | Clairvoyant:
        """One of SCHEDULERS."""
        if name == "clairvoyant":
            return Clairvoyant(self.shares, self.streams, self.options.groups_per_step, cluster or self.cluster, self.work,
                               steps=steps)
        return Mixer(self.shares, self.streams, dataclasses.replace(self.options, **SCHEDULERS[name]), self.sources)


def config_errors(config: SimulateConfig) -> list[str]:
    """What is wrong with a configuration whose types are right; each entry starts with its key."""
    errors = []
    if not (config.generate.count or config.sources or config.trace or config.train_config):
        errors.append("sources: nothing to simulate; name sources, generate.count, trace or train_config")
    for name in config.compare:
        if name not in SCHEDULERS:
            errors.append(f"compare: no scheduler {name!r}; there are: {', '.join(SCHEDULERS)}")
    for key in ("steps", "groups_per_step"):
        if getattr(config, key) < (2 if key == "steps" else 1):
            errors.append(f"{key}: must be at least {2 if key == 'steps' else 1}")
    for key in ("engines", "slots"):
        if getattr(config.cluster, key) < 1:
            errors.append(f"cluster.{key}: must be at least 1")
    for key in ("kv_tokens", "teacher_tokens_per_second"):
        if not getattr(config.cluster, key) > 0:
            errors.append(f"cluster.{key}: must be positive")
    for key in ("teacher_servers", "trainer_seconds", "trainer_tokens_per_second"):
        if getattr(config.cluster, key) < 0:
            errors.append(f"cluster.{key}: must not be negative")
    if config.size.enabled and not (config.cluster.trainer_seconds or config.cluster.trainer_tokens_per_second):
        errors.append("cluster.trainer_seconds: a cluster is sized to a trainer's pace; set it or trainer_tokens_per_second")
    if config.size.steps < 2 or config.size.tries < 1 or not 0 < config.size.idle_share < 1:
        errors.append("size: steps must be at least 2, tries at least 1, idle_share between 0 and 1")
    for name, source in config.sources.items():
        for key in ("seconds", "tokens", "turns", "group_size", "fresh_turns"):
            if not 0 < getattr(source, key) < math.inf:
                errors.append(f"sources.{name}.{key}: must be positive and finite")
        if not 0 < source.acceptance <= 1:
            errors.append(f"sources.{name}.acceptance: must lie in (0, 1]")
        if not 0 <= source.prefix_fraction <= 1:
            errors.append(f"sources.{name}.prefix_fraction: must lie in [0, 1]")
        if not (0 <= source.spread < math.inf and 0 <= source.share < math.inf):
            errors.append(f"sources.{name}: spread and share must not be negative or infinite")
        if source.environments is not None and source.environments < source.group_size:
            errors.append(f"sources.{name}.environments: has no room for a group of {source.group_size}")
    made = config.generate
    if made.count and (made.seconds <= 0 or made.tokens <= 0 or made.seconds_ratio < 1 or made.tokens_ratio < 1
                       or len(made.acceptance) != 2 or len(made.share) != 2
                       or not 0 < made.acceptance[0] <= made.acceptance[1] <= 1 or not 0 < made.share[0] <= made.share[1]):
        errors.append("generate: seconds and tokens must be positive, ratios at least 1, acceptance and share [low, high]")
    known = {f.name for f in dataclasses.fields(MixerOptions)} - {"groups_per_step"}
    unknown = sorted(set(config.mixer) - known)
    errors += [f"mixer.{key}: unknown key; there are: {', '.join(sorted(known))}" for key in unknown]
    if not unknown and config.groups_per_step >= 1:
        try:
            MixerOptions(config.groups_per_step, **config.mixer)
        except (TypeError, ValueError) as error:
            errors.append(f"mixer: {error}")
    return errors


def generated(made: GenerateConfig, seed: int) -> dict[str, WorkConfig]:
    """The sources of `generate`, seeded."""
    rng = np.random.default_rng([seed, 25])
    at = np.arange(made.count) / max(made.count - 1, 1)
    tokens = rng.permutation(made.tokens * made.tokens_ratio**at)
    seconds = made.seconds * made.seconds_ratio**at
    return {f"source{i:02d}": WorkConfig(
        share=float(rng.uniform(*made.share)), seconds=float(seconds[i]), tokens=float(tokens[i]), spread=made.spread,
        acceptance=float(rng.uniform(*made.acceptance))) for i in range(made.count)}


def scenario(config: SimulateConfig) -> Scenario:
    """Sources, work and cluster of a configuration. Raises TraceError, ConfigError, or NothingToSimulate where a domain of
    the training configuration has no work, or no source has a share."""
    recorded = read_trace(config.trace, tokens_per_second=config.cluster.tokens_per_second) if config.trace else {}
    works = {**generated(config.generate, config.seed), **config.sources}
    streams: dict[str, dict[str, float]] = {}
    groups = config.groups_per_step
    if config.train_config:
        training = load_config(config.train_config)
        groups = training.train.samples_per_step
        lost = [d for d in training.domains if d not in works and d not in recorded]
        if lost:
            raise NothingToSimulate(f"train_config {config.train_config}: nothing says how long the work of domain "
                                    f"{', '.join(lost)} takes; name it under sources, or in a trace")
        found = {}
        for name, domain in training.domains.items():
            own = {s: w for s, w in stream_shares(training, name).items() if s != "demonstration" and w > 0}
            streams[name] = own
            found[name] = dataclasses.replace(
                works.get(name, WorkConfig()), share=domain.share, group_size=training.train.group_size,
                fresh_turns=training.train.fresh_turns, environments=max(domain.environments, training.train.group_size))
        works = found
    else:
        works = {**{d: WorkConfig() for d in recorded}, **works}
        for name, work in works.items():
            f = work.prefix_fraction
            streams[name] = {s: w for s, w in (("rollout", 1 - f), ("prefix", f)) if w > 0}
    if not any(work.share > 0 for work in works.values()):
        raise NothingToSimulate("sources: every share is 0, so no step has a group; give one a share above 0")
    models, sources = {}, {}
    for name, work in works.items():
        for stream in streams[name]:
            model = _model(f"{name}/{stream}", name, stream, work, recorded.get(name))
            models[model.name] = model
            playing = work.environments if stream == "rollout" else None
            sources[model.name] = SourceOptions(model.group_size, playing)
    c = config.cluster
    cluster = Cluster(c.engines, c.slots, c.kv_tokens, c.teacher_servers, c.teacher_tokens_per_second, c.trainer_seconds,
                      c.trainer_tokens_per_second)
    return Scenario({d: w.share for d, w in works.items()}, streams, MixerOptions(groups, **config.mixer), sources,
                    Work(models, config.seed), cluster)


def _model(name: str, domain: str, stream: str, work: WorkConfig, recorded) -> SourceModel:
    """A fresh turn at a stored prefix takes a turn's share of the seconds and holds a context as long as a rollout's."""
    turns = 1.0 if stream == "rollout" else work.turns
    if recorded is not None and stream != "rollout":
        recorded = dataclasses.replace(recorded, seconds=recorded.seconds / recorded.turns)
    return SourceModel(name, domain, work.seconds / turns, work.tokens, work.spread, work.acceptance,
                       work.group_size if stream == "rollout" else work.fresh_turns, recorded)


def run_simulate(path: Path, overrides: Sequence[str], *, as_json: bool = False,
                 plot_to: Path | None = None) -> dict[str, Any]:
    """Simulate what `path` says, print it, and return it as JSON values."""
    config = load_as(SimulateConfig, path, overrides, config_errors)
    made = scenario(config)
    simulations: dict[str, Simulation] = {}
    for name in config.compare:
        progress = Progress(f"simulating {name}", config.steps)
        try:
            simulations[name] = Simulator(made.scheduler(name, config.steps), made.cluster, made.work, config.steps,
                                          progress=progress.update).run()
        except RuntimeError as error:
            raise NothingToSimulate(f"scheduler {name}: {error}") from error
    sized: list[Try] = []
    if config.size.enabled:
        progress = Progress("sizing", config.size.tries)
        sized = size_cluster(lambda cluster: made.scheduler("corrected", config.size.steps, cluster), made.work, made.target,
                             made.cluster, steps=config.size.steps, idle_share=config.size.idle_share,
                             tries=config.size.tries, progress=progress.update)
        progress.update(config.size.tries)
    if plot_to is not None:
        plot(simulations or {"corrected": sized[-1].simulation}, plot_to)
    answer = _answer(made, simulations, sized, config)
    if as_json:
        print(json.dumps(answer))
    else:
        _print(made, simulations, sized, answer, config, plot_to)
    return answer


def _answer(made: Scenario, simulations: dict[str, Simulation], sized: list[Try], config: SimulateConfig) -> dict[str, Any]:
    answer: dict[str, Any] = {
        "sources": len(made.work.models), "groups_per_step": made.options.groups_per_step,
        "cluster": dataclasses.asdict(made.cluster), "bounds": bounds(made.work, made.target, made.cluster),
        "slot_bound_step_seconds": bound_step_seconds(made.work, made.target, made.cluster.all_slots),
        "schedulers": {name: found.numbers() for name, found in simulations.items()}}
    if sized:
        last = sized[-1]
        need = little(made.work, made.target, last.cluster, last.step_seconds)
        answer["size"] = {
            "enough": last.scarce == "trainer", "engines": last.cluster.engines, "slots": last.cluster.all_slots,
            "teacher_servers": last.cluster.teacher_servers, "kv_tokens_in_flight": need.kv_tokens,
            "kv_peak_of_an_engine": last.simulation.kv_peak,
            "environments": {s: n for s, n in last.simulation.open_peak.items() if s.endswith("/rollout")},
            "trainer_idle_share": last.idle_share, "occupancy": last.occupancy, "step_seconds": last.step_seconds,
            "tries": [{"engines": t.cluster.engines, "teacher_servers": t.cluster.teacher_servers, "idle_share": t.idle_share,
                       "occupancy": t.occupancy, "step_seconds": t.step_seconds, "scarce": t.scarce} for t in sized]}
    return answer


def _print(made: Scenario, simulations: dict[str, Simulation], sized: list[Try], answer: dict[str, Any],
           config: SimulateConfig, plot_to: Path | None) -> None:
    cluster = made.cluster
    count = f"{cluster.engines} engines" if simulations else "engines"  # how many is what sizing finds
    print(f"{len(made.work.models)} sources, {made.options.groups_per_step} groups a step, {count} of {cluster.slots} slots "
          f"and {cluster.kv_tokens:,.0f} KV tokens")
    if simulations:
        print("a step takes at best, by part: " + ", ".join(f"{k} {v:.2f} s" for k, v in answer["bounds"].items()))
        best = simulations.get("clairvoyant")
        print(f"\n{'scheduler':<12} {'s/step':>8} {'occupancy':>9} {'of clairvoyant':>14} {'trainer idle':>12} "
              f"{'mean age':>8}  occupancy over time ({config.steps} steps)")
        for name, found in simulations.items():
            of = f"{found.occupancy / best.occupancy:>13.1%}" if best else f"{'–':>13}"
            print(f"{name:<12} {found.step_seconds:>8.2f} {found.occupancy:>9.1%} {of:>14} {found.trainer_idle_share:>12.1%} "
                  f"{found.mean_age:>8.2f}  {sparkline(occupancy(found, 40))}")
        for name, found in simulations.items():
            if found.kv_over_share > 0:
                print(f"{name}: at {found.kv_over_share:.1%} of the ends an engine held more than its KV memory "
                      f"(at most {found.kv_peak:,.0f} tokens); a real one would preempt. Raise mixer.kv_safety")
    if sized:
        size = answer["size"]
        print(f"\nsizing for a trainer that waits at most {config.size.idle_share:.0%} of the time, once work of every "
              "length is under way")
        for t in sized:
            print(f"  {t.cluster.engines:>5} engines, {t.cluster.teacher_servers:>4} teacher servers: "
                  f"step {t.step_seconds:.1f} s, trainer idle {t.idle_share:.1%}, "
                  f"slots busy {t.occupancy:.0%}, bound by {t.scarce}")
        if not size["enough"]:
            print(f"  not enough after {len(sized)} tries; raise size.tries")
        places = size["environments"]
        few = ", ".join(f"{s.removesuffix('/rollout')} {n}" for s, n in sorted(places.items(), key=lambda e: -e[1])[:5])
        print(f"need: {size['engines']} engines ({size['slots']} slots; an engine held at most "
              f"{size['kv_peak_of_an_engine']:,.0f} KV tokens), {size['teacher_servers']} teacher servers, "
              f"{sum(places.values())} environments (each domain's most: {few}); "
              f"a step takes {human_seconds(size['step_seconds'])}")
    if plot_to is not None:
        print(f"plot: {plot_to}")
