"""What a teacher in training is worth: it plays its domains' tasks, and its loss on held-out demonstrations is measured.

Where every domain can be played the share of solved tasks decides (the mean score breaks ties), otherwise the held-out loss.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import nn

from mopd.config import Config, ConfigError
from mopd.config_supervised import SFTConfig
from mopd.domains import close_domains, open_domains
from mopd.learner.best import Evaluation
from mopd.learner.supervised import mean_cross_entropy
from mopd.progress import Progress
from mopd.rows import Row
from mopd.sampling.hf import HFEngine
from mopd.sampling.play import PlayedTask, play_tasks
from mopd.sampling.rendering import ChatRenderer
from mopd.statistics import wilson_interval


class NothingEvaluated(RuntimeError):
    """Every episode of an evaluation failed for reasons of infrastructure; the message has the first failure's words."""


def check_evaluation(config: Config, key: str, options: SFTConfig, domains: Sequence[str], held_out: Sequence[Row]) -> None:
    """Raise ConfigError where a domain can neither be played nor has a held-out demonstration. `key` is where `options`
    stand."""
    there = {row.domain for row in held_out}
    lacking = [name for name in domains if not config.domains[name].environment and name not in there]
    if lacking:
        raise ConfigError(f"{key}.evaluate_every: domain {', '.join(lacking)} has no environment to play in and no held-out "
                          f"demonstration; set {key}.held_out_fraction (and have two demonstrations at least), or "
                          f"{key}.evaluate_every=0")


class TeacherEvaluation:
    """Called with the step, it evaluates `model` as it is then. Close it to end the environments.

    The model plays `evaluation_episodes` tasks of `evaluation_split` in every domain that has an environment, at
    `evaluate.temperature` (0: greedy), the same tasks and draws at every evaluation. Infrastructure failures are left out and
    counted. Raises ConfigError for environments or tasks that are not there, ValueError for a model that cannot be played.
    """

    def __init__(self, config: Config, options: SFTConfig, domains: Sequence[str], model: nn.Module, renderer: ChatRenderer,
                 held_out: Sequence[Row], *, pad_id: int):
        self.config, self.options, self.model, self.renderer = config, options, model, renderer
        self.held_out, self.pad_id = list(held_out), pad_id
        playable = [name for name in domains if config.domains[name].environment]
        self.by_play = len(playable) == len(domains)
        self.domains = open_domains(config, playable) if playable else {}
        try:
            self.tasks = {name: domain.spread(options.evaluation_split,
                                              options.evaluation_episodes or domain.config.evaluation_episodes)
                          for name, domain in self.domains.items()}
            if playable:
                HFEngine(model, max_batch=config.evaluate.batch)  # what cannot be played is said before the training
        except BaseException:
            self.close()
            raise

    def __call__(self, step: int) -> Evaluation:
        record: dict[str, Any] = {"by": "play" if self.by_play else "held-out loss", "domains": {}}
        if self.domains:
            engine = HFEngine(self.model, max_batch=self.config.evaluate.batch, verify=False)
            bar, done = Progress(f"evaluation after step {step}", sum(map(len, self.tasks.values()))), 0
            for name, domain in self.domains.items():
                played = play_tasks(engine, domain.pool, name, self.tasks[name], self.renderer, domain.harnesses,
                                    temperature=self.config.evaluate.temperature, seed=self.config.seed,
                                    progress=lambda n, before=done, who=name: bar.update(before + n, who))
                done += len(played)
                record["domains"][name] = _summary(name, step, played)
            parts = list(record["domains"].values())
            record |= {key: sum(part[key] for part in parts) / len(parts) for key in ("success", "score")}
        if self.held_out:
            losses = mean_cross_entropy(self.model, self.held_out, pad_id=self.pad_id,
                                        token_budget=self.options.micro_batch_tokens)
            for name, loss in losses.items():
                record["domains"].setdefault(name, {})["held_out_loss"] = loss
            record["held_out_loss"] = sum(losses.values()) / len(losses)
        if self.by_play:
            return Evaluation((record["success"], record["score"]), record)
        loss = record["held_out_loss"]
        return Evaluation((-loss if math.isfinite(loss) else -math.inf,), record)

    def close(self) -> None:
        close_domains(self.domains)


def _summary(name: str, step: int, played: list[PlayedTask]) -> dict[str, Any]:
    counted = [p for p in played if not p.failure]
    if not counted:
        raise NothingEvaluated(f"domains.{name}: all {len(played)} episodes of the evaluation after step {step} failed for "
                               f"reasons of infrastructure ({played[0].failure}). Mend the environment and run the same "
                               "command again: it goes on from the last checkpoint")
    wins = sum(p.success for p in counted)
    low, high = wilson_interval(wins, len(counted))
    return {"success": wins / len(counted), "low": low, "high": high, "score": sum(p.score for p in counted) / len(counted),
            "n": len(counted), "failures": len(played) - len(counted), "turns": sum(p.turns for p in counted)}


def say(evaluation: Evaluation) -> str:
    """An evaluation in a few words."""
    record = evaluation.record
    words = []
    if "success" in record:
        words.append(f"solves {record['success']:.2f}, score {record['score']:.2f}")
    if "held_out_loss" in record:
        words.append(f"held-out loss {record['held_out_loss']:.3f}")
    return ", ".join(words)
