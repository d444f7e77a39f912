"""A domain's parts built from its config: environment family, pool, tasks, harness; and its demonstrations.

Knows environments, renderer and store; knows no model.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mopd.config import Config, ConfigError, DomainConfig
from mopd.config_domains import harnesses, worker_options
from mopd.environments.base import EnvironmentFamily, Task
from mopd.environments.demonstrations import demonstrate, write_transcripts
from mopd.environments.pool import EnvironmentPool
from mopd.environments.registry import make_family
from mopd.environments.replay import Replayer
from mopd.environments.workers import WorkerFamily
from mopd.progress import Progress
from mopd.sampling.harness import Harness, Harnesses
from mopd.seeds import stable_seed


class Domain:
    """One domain, ready to play: `family`, `pool`, `tasks(split)`, `harnesses` (`harness` is the one with the largest share).
    Close it to end its processes."""

    def __init__(self, name: str, config: DomainConfig):
        self.name, self.config = name, config
        self.family: EnvironmentFamily = (
            WorkerFamily(config.environment, config.options, workers=worker_options(config)) if config.worker_processes
            else make_family(config.environment, config.options))
        self.pool = EnvironmentPool(self.family, size=config.environments, workers=config.workers)
        self.harnesses = harnesses(config, self.family.system_prompt)
        self._tasks: dict[str, list[Task]] = {}
        self._replayer: Replayer | None = None

    def counts(self) -> dict[str, dict[str, int]]:
        """What happened to its environments so far: `failures` by category (those that a second try mended among them), and
        where there are worker processes `workers`, what became of them (WorkerFamily.counts), and where its Java runs in
        this process `java`: how many were started."""
        found = {"failures": dict(self.pool.stats.failures)}
        if isinstance(self.family, WorkerFamily):
            found["workers"] = dict(self.family.counts)
        elif starts := getattr(self.family, "java_starts", 0):
            found["java"] = {"started": starts}
        return found

    @property
    def harness(self) -> Harness:
        """The harness with the largest share. Set, it is the only one."""
        return self.harnesses[self.harnesses.main]

    @harness.setter
    def harness(self, harness: Harness) -> None:
        self.harnesses = Harnesses({"": harness})

    def tasks(self, split: str) -> list[Task]:
        """Tasks of a split; an empty split is a ConfigError that names the domain."""
        if split not in self._tasks:
            tasks = self.family.tasks(split)
            if not tasks:
                raise ConfigError(f"domains.{self.name}.options: environment {self.config.environment} has no {split} tasks")
            self._tasks[split] = tasks
        return self._tasks[split]

    def draw(self, split: str, *seed: int | str) -> Task:
        """The task that `seed` picks; a pure function of its parts."""
        tasks = self.tasks(split)
        return tasks[stable_seed(self.name, split, *seed) % len(tasks)]

    def spread(self, split: str, count: int) -> list[Task]:
        """`count` tasks of a split (all if 0), evenly over its order; fewer where the split has fewer."""
        tasks = self.tasks(split)
        if count <= 0 or count >= len(tasks):
            return list(tasks)
        return [tasks[i * len(tasks) // count] for i in range(count)]

    def probe(self) -> None:
        """Start what an environment needs (a Java process), which is when some wrong options show: ValueError."""
        self.family.create().close()

    @property
    def replayer(self) -> Replayer:
        """Restores environments of the pool at stored decision points, in threads that start when it is first asked for."""
        if self._replayer is None:
            self._replayer = Replayer(self.pool, workers=self.config.workers)
        return self._replayer

    def close(self) -> None:
        if self._replayer is not None:
            self._replayer.close()
        self.pool.close()
        self.family.close()


def open_domain(config: Config, name: str) -> Domain:
    """Build one domain, ready to play; raises ConfigError where its environment or an option of it is wrong."""
    domain = None
    try:
        domain = Domain(name, config.domains[name])
        domain.probe()
        return domain
    except (ValueError, ImportError) as error:
        if domain is not None:
            domain.close()
        raise ConfigError(f"domains.{name}.environment: {error}") from error


def open_domains(config: Config, names: Sequence[str] | None = None) -> dict[str, Domain]:
    """Build the named domains (all by default). Raises ConfigError naming the domain whose environment cannot be built;
    those already built are closed again."""
    built: dict[str, Domain] = {}
    try:
        for name in names or config.domains:
            built[name] = open_domain(config, name)
    except BaseException:
        close_domains(built)
        raise
    return built


def close_domains(domains: dict[str, Domain]) -> None:
    for domain in domains.values():
        domain.close()


def demonstrate_domain(config: Config, name: str, out: Path) -> None:
    """The expert plays `demonstrations` training tasks and a novice `novice_episodes`; transcripts go to `out`.

    Prints what was kept and why the rest was not. Raises ConfigError when the expert solved nothing.
    """
    if not config.domains[name].demonstrations and not config.domains[name].novice_episodes:
        raise ConfigError(f"domains.{name}.demonstrations: it is 0, and so is novice_episodes, so nobody would play; set "
                          "one of them")
    domain = open_domain(config, name)
    try:
        players = (("expert", domain.config.demonstrations, 0.0, "success"),
                   ("novice", domain.config.novice_episodes, config.novice.random_share, "all"))
        transcripts: list[dict] = []
        said = []
        progress = Progress(f"expert of {name}", domain.config.demonstrations + domain.config.novice_episodes)
        for number, (player, count, random_share, keep) in enumerate(players):
            if not count:
                continue
            before = number * domain.config.demonstrations
            # Novices play tasks of their own as far as the split has enough of them.
            tasks = domain.spread("train", sum(p[1] for p in players))
            tasks = [tasks[(before + i) % len(tasks)] for i in range(count)] if len(tasks) >= before + count else [
                domain.tasks("train")[i % len(domain.tasks("train"))] for i in range(count)]
            played = demonstrate(
                domain.family, name, tasks, seed=stable_seed(config.seed, name, player), random_share=random_share,
                max_turns=domain.config.max_turns, keep=keep, workers=domain.config.workers, source_id=f"{name}-{player}",
                progress=lambda done, _, base=before, who=player: progress.update(base + done, who))
            # What the rollouts will be told, not the environment's own words.
            transcripts += [t | {"system": domain.harness.system_prompt} for t in played.transcripts]
            others = {k: v for k, v in played.counts.items() if k != "kept"}
            said.append(f"{player}: {played.counts.get('kept', 0)} of {count} episodes kept" +
                        "".join(f", {v} {k} (e.g. {played.examples[k]})" for k, v in others.items()))
            if player == "expert" and not played.transcripts:
                raise ConfigError(f"domains.{name}: the expert solved none of {count} training tasks: {others}")
        write_transcripts(out, transcripts)
        print("result: " + "; ".join(said))
    finally:
        domain.close()


def import_demonstrations(config: Config, files: list[Path], domain: str | None, *, expert_only: bool) -> None:
    """Render demonstrations with the student's chat template and put them into the store (made if it is not there).

    Prints per file how many rows were taken and why the others were not. Raises ConfigError when nothing is to be read.
    """
    from mopd.importing import import_from_config

    import_from_config(config, files, domain, expert_only=expert_only)
