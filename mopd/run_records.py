"""What a run writes down: one record per step, and a few episodes with the teacher's opinion of every sampled token."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import torch

from mopd.config import stream_shares
from mopd.counts import summed
from mopd.learner.packing import pack
from mopd.losses.objectives import label_logprob
from mopd.rank_watch import straggling
from mopd.rows import STREAMS
from mopd.sampling.fresh_turn import rows_from_sequence
from mopd.sampling.streams import StepSamples, Streams
from mopd.schedule import Plan
from prefix_store.scores import write_scores
from prefix_store.selection import Selector

EPISODES_PER_DOMAIN = 2
DIVERGED_SHOWN = 3
COSTS = ("training", "sampling", "scoring", "environments", "grading")
# environments judge the outcome themselves, so nothing is spent on grading yet


def step_record(plan: Plan, samples: StepSamples, report, notes: list[str], wall: float,
                scoring: dict[str, Any] | None = None, told: dict[str, Any] | None = None,
                weights: dict[str, Any] | None = None) -> dict[str, Any]:
    """The metrics of one step under the names that report and tests read. Seconds are wall-clock; `waiting` is the part of
    scoring in which the run stood still for teachers behind servers. `scoring` as teachers.watch gives it, `told` as a
    source's `take` does, `weights` as its `hand_over`; of their seconds `idle` is what training waited for samples."""
    metrics, scoring = report.metrics, dict(scoring or {})
    waiting = scoring.pop("waited_s", 0.0)
    seconds = {"training": metrics["seconds"]["training"] + metrics["seconds"]["packing"],
               "scoring": metrics["seconds"]["scoring"] + waiting, **samples.seconds, "grading": 0.0, "waiting": waiting,
               "total": wall}
    told, weights = dict(told or {}), dict(weights or {})
    seconds |= {"idle": told.pop("waited_s", 0.0), "weights": weights.pop("seconds", 0.0),
                "weights_probe": weights.pop("probe_seconds", 0.0)}
    missing = sum(sum(reasons.values()) for reasons in metrics.get("missing", {}).values())
    spent = sum(seconds[name] for name in COSTS) or 1.0
    seconds["shares"] = {name: seconds[name] / spent for name in COSTS}
    domains: dict[str, Any] = {}
    for name, share in plan.shares.items():
        numbers = metrics["domains"].get(name, {})
        episodes = [e for e in samples.episodes if e.spec.domain == name and not e.failure]
        streams = {key.split("/")[1]: cell for key, cell in metrics["streams"].items() if key.split("/")[0] == name}
        domains[name] = {
            "share": share, "samples": plan.counts[name], "tokens": numbers.get("tokens", 0),
            "reverse_kl": numbers.get("k1"), "reverse_kl_k3": numbers.get("k3"),
            "reverse_kl_exact": numbers.get("reverse_kl"), "forward_kl": numbers.get("forward_kl"),
            "entropy_student": numbers.get("student_entropy"), "entropy_teacher": numbers.get("teacher_entropy"),
            "teacher_agreement": numbers.get("agreement"), "masked_share": numbers.get("masked_share", 0.0),
            "clipped_share": numbers.get("clipped_share", 0.0), "diagnostics": numbers.get("diagnostics", {}),
            "unscored_share": numbers.get("unscored_share", 0.0),
            "mismatch_mean": numbers.get("mismatch_mean"), "mismatch_max": numbers.get("mismatch_max"),
            "effective_sample_size": numbers.get("effective_sample_size"),
            "cut_share": numbers.get("cut_share", 0.0), "candidates_mean": numbers.get("candidates_mean"),
            "staleness": numbers.get("staleness", 0.0),
            "reward": _mean([e.score for e in episodes]), "success": _mean([float(e.success) for e in episodes]),
            "turns": _mean([float(e.turns) for e in episodes]),
            "malformed": sum(e.malformed for e in episodes), "infra_failures": dict(samples.failures.get(name, {})),
            **_by_harness(episodes),
            "outcome_groups": samples.outcome_groups.get(name),
            "depth": _depths(streams), "resumed": _resumed([e for e in samples.resumed if e.spec.domain == name]),
            "streams": {s: {"tokens": c["tokens"], "sequences": c["actions"], "reverse_kl": c.get("k1")}
                        for s, c in streams.items()}}
    return {
        "step": plan.step, "loss": metrics["loss"], "skipped": metrics["skipped"],
        "gradient_norm": metrics.get("gradient_norm"), "learning_rate": metrics.get("learning_rate"), "seconds": seconds,
        "tokens": {"sampled": samples.sampled_tokens, "trained": metrics.get("loss_tokens", 0),
                   "scored": metrics.get("loss_tokens", 0) - missing, "computed": metrics.get("tokens", 0)},
        "environment_steps": samples.environment_steps, "groups": samples.groups,
        "dropped_groups": samples.dropped_groups, "omega": metrics.get("omega", {}),
        "aggregation": metrics.get("aggregation", {}), "balance": metrics.get("balance", {}),
        "missing": metrics.get("missing", {}), "domains": domains,
        "selection": samples.selection, "scoring": scoring, "sampling": told, "weights": weights,
        "router": {**metrics.get("expert_load", {}), "alerts": metrics.get("alerts", [])}, "notes": notes}


def progress_words(record: dict[str, Any]) -> str:
    """What is shown of a step behind the progress bar: loss, and where samplers run ahead how long training waited for them,
    how busy they were and how old its tokens."""
    words = f"loss {record['loss']:.3f}"
    told = record["sampling"]
    if "busy_share" in told:
        idle = record["seconds"]["idle"] / max(record["seconds"]["total"], 1e-9)
        words += (f", trainer idle {idle:.0%}, samplers busy {told['busy_share']:.0%}, staleness "
                  f"{told['staleness_mean']:.1f} (max {told['staleness_max']}), {told['in_flight']} groups in flight")
        words += "".join(f", {number} {reason}" for reason, number in told["dropped"].items())
    return words


def _by_harness(episodes: list) -> dict[str, Any]:
    """{"harnesses": {name: how its rollouts went}} for a domain with several; nothing else."""
    found: dict[str, list] = {}
    for episode in episodes:
        if episode.harness:
            found.setdefault(episode.harness, []).append(episode)
    return {"harnesses": {name: {
        "sequences": len(part), "reward": _mean([e.score for e in part]), "success": _mean([float(e.success) for e in part]),
        "turns": _mean([float(e.turns) for e in part]), "malformed": sum(e.malformed for e in part)}
        for name, part in sorted(found.items())}} if found else {}


def add_processes(record: dict[str, Any], parts: list[dict[str, Any]], metrics: dict[str, Any], limit: float) -> None:
    """Put into a step's record what only the processes themselves know, summed over them: `cpu` seconds of the step, and
    `counts` of what went wrong in sampling since the start (see mopd.sources.Source.counts). Of several also `ranks`: how
    long each waited for the others (mopd/rank_watch.py), with an alert in `metrics` where one held the others up for more
    than `limit` of the step."""
    for name in ("cpu", "cpu_sampling"):  # of these processes, not of samplers; and of it that until the samples were there
        record["seconds"][name] = sum(part[name] for part in parts)
    if len(parts) > 1:
        record["ranks"], alert = straggling([part["waited"] for part in parts], record["seconds"]["total"], limit)
        if alert:
            metrics.setdefault("alerts", []).append(alert)
    counts = summed(part["counts"] for part in parts)
    for name, numbers in record["domains"].items():
        found = counts.get("environments", {}).get(name, {})
        numbers["environment_failures"] = found.get("failures", {})
        numbers |= {what: found[what] for what in ("workers", "java") if found.get(what)}
    record["sampling"] |= {name: found for name, found in (("engine_faults", counts.get("engine")),
                                                           ("again", counts.get("again"))) if found}


class NothingScored(RuntimeError):
    """No token of a domain has had a teacher's score for several steps: it would go untrained unseen."""


class Notices:
    """Says on stderr what a step's record has as an alert, each kind once; the records hold them all."""

    UNSCORED_STEPS = 3
    # a teacher may miss a step; a domain that has none of its tokens scored three times running is not being trained

    def __init__(self, *, quiet: bool = False) -> None:
        """quiet: raise, but say nothing (another rank says the same)."""
        self._quiet = quiet
        self._said: set[str] = set()
        self._unscored: dict[str, int] = {}

    def say(self, step: int, metrics: dict[str, Any]) -> None:
        """metrics as LearnerStep gives them. Raises NothingScored."""
        for alert in metrics.get("alerts", []):
            kind = re.sub(r"\d+(\.\d+)?%?", "#", alert)
            if kind not in self._said and not self._quiet:
                self._said.add(kind)
                print(f"step {step}: {alert} (said once; metrics.jsonl has every step)", file=sys.stderr)
        for name, numbers in metrics.get("domains", {}).items():
            lost = numbers.get("unscored_share", 0.0) == 1.0
            self._unscored[name] = self._unscored.get(name, 0) + 1 if lost else 0
            if self._unscored[name] >= self.UNSCORED_STEPS:
                raise NothingScored(
                    f"step {step}: for {self.UNSCORED_STEPS} steps no token of domain {name!r} has had its teacher's score "
                    f"({metrics.get('missing') or 'no reason given'}). Mend the teacher and run the same command again: it "
                    "goes on from the last checkpoint")


def scored_episodes(streams: Streams, step: int, model: torch.nn.Module, launch) -> list[dict[str, Any]]:
    """A few episodes of the finished student, every action token with the student's and the teacher's log-probability.
    Only in domains whose recipe plays: a run on stored prefixes alone needs no environment, not even here."""
    counts = {name: {"rollout": EPISODES_PER_DOMAIN} for name in launch.config.domains
              if stream_shares(launch.config, name)["rollout"] > 0}
    samples = streams.sample(Plan(step, counts, {}))
    scorers = launch.registry.scorers()
    split = [name for name, scorer in scorers.items() if getattr(scorer, "collective", False)]
    if split:  # these episodes are rank 0's alone
        print(f"episodes.json has no teacher's scores for {', '.join(split)}: their teacher's weights are split over ranks",
              file=sys.stderr)
    tokenizer = launch.tokenizer
    pages = []
    for episode in samples.episodes:
        if episode.sequence is None:
            continue
        domain = episode.spec.domain
        rows = rows_from_sequence(episode.sequence, domain=domain, stream="rollout", group=0, sequence_number=0)
        scores: dict[int, list[dict[str, Any]]] = {}
        for batch in pack(rows, token_budget=1 << 20, pad_id=launch.renderer.end_id, domains=[domain], streams=STREAMS):
            teacher = [None] * batch.loss_tokens
            if domain not in split:
                teacher = scorers[domain](batch, need="sampled", temperature=streams.temperature).logprob.tolist()
            student = _student_logprob(model, batch, streams.temperature)
            for turn, label, t, s in zip(batch.turn.tolist(), batch.label.tolist(), teacher, student.tolist(), strict=True):
                text = tokenizer.decode([label])
                scores.setdefault(turn, []).append({"text": text, "teacher_logprob": t, "student_logprob": s})
        context = episode.sequence.contexts[-1]
        segments = []
        for segment in context.segments:
            part = {"kind": segment.kind, "text": tokenizer.decode(context.tokens[segment.start:segment.end].tolist())}
            if segment.kind == "action":
                part["tokens"] = scores.get(segment.turn, [])
            segments.append(part)
        pages.append({"domain": domain, "task": f"{episode.sequence.task}:{episode.sequence.seed}",
                      "success": episode.success, "model": streams.student, "segments": segments})
    return pages


@torch.no_grad()
def _student_logprob(model: torch.nn.Module, batch, temperature: float) -> torch.Tensor:
    from mopd.learner.forward import PackedLM

    was_training = model.training
    model.eval()
    logprob = PackedLM(model).per_token(
        batch, lambda logits, part: label_logprob(logits, part.label, temperature, part.candidates))
    model.train(was_training)
    return logprob


def _resumed(episodes: list) -> dict[str, Any] | None:
    """How the sequences that went on from stored points for several turns ended; None where there were none.

    `finished` counts those whose episode ended, `success` is the share of them that solved the task; `replayed_steps` led
    to their points; `diverged` names the first few replays that did not come to their point.
    """
    if not episodes:
        return None
    played = [e for e in episodes if not e.failure]
    finished = [e for e in played if e.ended == "done"]
    return {"sequences": len(episodes), "failed": len(episodes) - len(played), "finished": len(finished),
            "success": _mean([float(e.success) for e in finished]), "turns": _mean([float(e.turns) for e in played]),
            "replayed_steps": sum(e.spec.start.turn for e in played),
            "diverged": [e.failure_record for e in episodes if e.failure_record][:DIVERGED_SHOWN]}


def write_selection(folder: Path, selector: Selector) -> None:
    """selection.json: decision points drawn by domain, source kind and depth. scores.json: the measured scores by decision
    point (see prefix_store.scores.read_scores), where any was measured."""
    summary = {"strategy": selector.options.strategy, "options": selector.options.plain(), "drawn": selector.statistics()}
    (folder / "selection.json").write_text(json.dumps(summary, indent=1))
    if len(selector.scores.touched()):
        write_scores(folder / "scores.json", selector.scores)


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _depths(streams: dict[str, dict]) -> dict[str, int]:
    """Actions by turn number of the decision points (prefix streams only)."""
    total: dict[str, int] = {}
    for name, cell in streams.items():
        if name in ("teacher_prefix", "sft_prefix"):
            for depth, count in cell["depth"].items():
                total[depth] = total.get(depth, 0) + count
    return total
