"""The MOPD² step: cells with their own normaliser, missing scores masked, and metrics that are global."""

from __future__ import annotations

import collections
import dataclasses
import json
import math

import numpy as np
import pytest
import torch

from mopd.learner.engine import Learner, LearnerConfig
from mopd.learner.packing import pack
from mopd.learner.scores import Scores
from mopd.learner.step import LearnerStep, MissingScorer, StepConfig
from mopd.losses import ObjectiveResult, aggregate, divergence
from mopd.losses.objectives import diagnose
from mopd.metrics import clean
from mopd.rows import STREAMS
from teachers.scoring.hf import HFTeacher
from teachers.scoring.mixture import MixtureScorer
from tests.mopd.learner.test_engine import run_python
from tests.mopd.learner.tiny import branch_row, make_model, mixed_rows, repeated_prefix_logits, rollout_row

DOMAINS = ("game", "science")
SHARES = {"game": 0.3, "science": 0.7}
STREAM_SHARE = {"rollout": 0.5, "teacher_prefix": 0.3, "sft_prefix": 0.2, "demonstration": 0.0}


def rows_of(seed=0):
    rng = np.random.default_rng(seed)
    rows = mixed_rows(rng, 9)
    rows.append(branch_row(rng, size=12, branches=2, stream="sft_prefix", domain="science", group=20))
    return rows


def build(scorers=None, model=None, training=None, **changes):
    learner = Learner(
        model or make_model("qwen3_moe"),
        total_steps=5,
        config=LearnerConfig(learning_rate=1e-2, schedule="constant", gradient_clipping=0.0, **training or {}),
    )
    if scorers is None or isinstance(scorers, str):  # a teacher per domain, or all of them mixed
        made = {d: HFTeacher(make_model("qwen3_moe", seed=7 + i), teacher=f"t_{d}") for i, d in enumerate(DOMAINS)}
        scorers = made if scorers is None else dict.fromkeys(DOMAINS, MixtureScorer(list(made.values()), [1, 3], scorers))
    config = StepConfig(**{"stream_share": STREAM_SHARE, "token_budget": 150, **changes})
    return LearnerStep(learner, domains=DOMAINS, scorers=scorers, config=config)


@pytest.mark.parametrize("mode", ["token_mean", "sequence_mean", "turn_mean"])
def test_the_loss_is_the_sum_of_cells(mode):
    """Against the plain formula: repeated prefixes, one aggregate per (domain, stream), ω renormalised."""
    rows = rows_of()
    step = build(aggregation=mode)
    expected, total = 0.0, 0.0
    with torch.no_grad():
        for d, domain in enumerate(DOMAINS):
            teacher = make_model("qwen3_moe", seed=7 + d)
            for stream in STREAMS:
                cell = [r for r in rows if (r.domain, r.stream) == (domain, stream)]
                if not cell:
                    continue
                value = divergence(
                    repeated_prefix_logits(step.learner.model, cell),
                    repeated_prefix_logits(teacher, cell),
                    kind="forward_kl",
                )
                ids = {
                    n: torch.tensor([getattr(a, n) for r in cell for a in r.actions for _ in a.tokens])
                    for n in ("sequence", "group", "turn")
                }
                omega = SHARES[domain] * STREAM_SHARE[stream]
                expected += omega * aggregate(value, mode=mode, **ids).item()
                total += omega
    report = step(rows, shares=SHARES)
    assert report.loss == pytest.approx(expected / total, rel=1e-4)
    assert sum(report.metrics["omega"].values()) == pytest.approx(1.0)
    assert sum(s["loss"] for s in report.metrics["streams"].values()) == pytest.approx(report.loss, rel=1e-4)
    assert sum(s["weight"] for s in report.metrics["streams"].values()) == pytest.approx(1.0, rel=1e-5)
    step.learner.close()


def test_metrics_are_there_and_right():
    rows = rows_of()
    step = build()
    with torch.no_grad():
        game = [r for r in rows if r.domain == "game"]
        mine = torch.log_softmax(repeated_prefix_logits(step.learner.model, game), -1)
        theirs = torch.log_softmax(repeated_prefix_logits(make_model("qwen3_moe", seed=7), game), -1)
    label = torch.from_numpy(np.concatenate([a.tokens for r in game for a in r.actions]).astype(np.int64))[:, None]
    behaviour = torch.from_numpy(np.concatenate([a.behaviour_logprob for r in game for a in r.actions]))
    student = mine.gather(1, label)[:, 0]
    k1 = (student - theirs.gather(1, label)[:, 0]).mean()
    gap = student - behaviour
    report = step(rows, shares=SHARES)
    found = report.metrics["domains"]["game"]
    assert found["k1"] == pytest.approx(k1.item(), rel=1e-3)
    assert found["reverse_kl"] == pytest.approx((mine.exp() * (mine - theirs)).sum(-1).mean().item(), rel=1e-3)
    assert report.reverse_kl["game"] == found["reverse_kl"]
    assert found["student_entropy"] == pytest.approx(-(mine.exp() * mine).sum(-1).mean().item(), rel=1e-3)
    assert found["agreement"] == pytest.approx((theirs.argmax(-1) == label[:, 0]).float().mean().item())
    assert found["mismatch_mean"] == pytest.approx(gap.abs().mean().item(), rel=1e-3)
    assert found["mismatch_max"] == pytest.approx(gap.abs().max().item(), rel=1e-3)
    ratio = gap.exp()
    assert found["effective_sample_size"] == pytest.approx((ratio.mean() ** 2 / (ratio**2).mean()).item(), rel=1e-2)
    depth = collections.Counter(str(a.turn) for r in game for a in r.actions)
    assert found["depth"] == dict(depth) and found["actions"] == sum(depth.values())
    assert found["tokens"] == len(label) == found["trained_tokens"] and found["masked_share"] == 0
    metrics = report.metrics
    assert metrics["loss_tokens"] == sum(r.loss_tokens for r in rows)
    assert len(metrics["expert_load"]["cv"]) == 2
    assert set(metrics["seconds"]) == {"packing", "scoring", "training"}
    json.dumps(clean(metrics), allow_nan=False)
    step.learner.close()


def test_student_equal_to_teacher_gives_no_loss_and_no_gradient():
    model = make_model("qwen3_moe")
    teacher = HFTeacher(make_model("qwen3_moe"), teacher="same")
    for objective in ("reverse_kl", "forward_kl", "jsd", "mopd"):
        step = build({d: teacher for d in DOMAINS}, model, objective=objective)
        report = step(rows_of(), shares=SHARES)
        assert abs(report.loss) < 1e-5 and report.metrics["gradient_norm"] < 1e-4, objective
        step.learner.close()
    teacher.check_unchanged()


class Naive:
    """A forward KL as a user would write it, without a thought of missing scores."""

    needs = "full"

    def __call__(self, *, student_logits, teacher_logits, **_):
        p, q = student_logits.log_softmax(-1), teacher_logits.log_softmax(-1)
        return ObjectiveResult((q.exp() * (q - p)).sum(-1), {"peak": q.exp().amax(-1)})


@pytest.mark.parametrize("objective", ["forward_kl", "tests.mopd.learner.test_step:Naive"])
def test_missing_scores_are_masked_and_counted_not_trained(objective):
    """A score of NaN leaves loss, gradient and denominators as if the token's action did not exist."""
    rows = [rollout_row(np.random.default_rng(i), size=20, turns=3, group=i) for i in range(4)]

    def lossy(batch, *, need, temperature):
        scores = teacher(batch, need=need, temperature=temperature)
        lost = (batch.row == 2) & (batch.action == 1)
        scores.logits[lost], scores.logprob[lost] = math.nan, math.nan
        scores.missing["timeout"] += int(lost.sum())
        return scores

    teacher = HFTeacher(make_model("qwen3_moe", seed=7), teacher="t")
    step = build({d: lossy for d in DOMAINS}, objective=objective)
    report = step(rows, shares=SHARES)
    step.learner.close()
    smaller = list(rows)
    smaller[2] = dataclasses.replace(rows[2], actions=(rows[2].actions[0], rows[2].actions[2]))
    other = build({d: teacher for d in DOMAINS})
    expected = other(smaller, shares=SHARES)
    other.learner.close()
    assert report.loss == pytest.approx(expected.loss, rel=1e-5)
    assert report.metrics["gradient_norm"] == pytest.approx(expected.metrics["gradient_norm"], rel=1e-4)
    lost = len(rows[2].actions[1].tokens)
    assert report.metrics["missing"] == {"t": {"timeout": lost}}
    game = report.metrics["domains"]["game"]
    assert game["unscored_tokens"] == lost and game["trained_tokens"] == game["tokens"] - lost
    assert any("t: 3 tokens without a score" in a or "without a score" in a for a in report.metrics["alerts"])


def test_stale_tokens_are_left_out_and_an_empty_step_is_skipped():
    rows = rows_of()
    step = build(max_staleness=2)
    before = [p.detach().clone() for p in step.learner.model.parameters()]
    with pytest.warns(UserWarning, match="no token is left"):
        report = step(rows, shares=SHARES, step=3)
    assert report.skipped and step.learner.step == 1
    assert all(torch.equal(a, b) for a, b in zip(before, step.learner.model.parameters(), strict=True))
    fresh = [
        dataclasses.replace(r, actions=tuple(dataclasses.replace(a, version=a.version + 3) for a in r.actions))
        if r.domain == "game"
        else r
        for r in rows
    ]
    report = step(fresh, shares=SHARES, step=3)
    assert report.metrics["domains"]["science"]["trained_tokens"] == 0
    assert report.metrics["domains"]["science"]["stale_tokens"] == sum(
        r.loss_tokens for r in rows if r.domain != "game"
    )
    assert set(k.split("/")[0] for k in report.metrics["omega"]) == {"game"}
    with pytest.warns(UserWarning, match="no token is left"):
        assert step([], shares=SHARES).skipped
    step.learner.close()


def test_normalised_balance_uses_the_students_own_deviation():
    rows = rows_of()
    step = build(balance="normalised", objective="mopd")
    with torch.no_grad():
        ratios = {}
        for d, domain in enumerate(DOMAINS):
            cell = [r for r in rows if r.domain == domain]
            label = torch.from_numpy(np.concatenate([a.tokens for r in cell for a in r.actions]).astype(np.int64))
            student = torch.log_softmax(repeated_prefix_logits(step.learner.model, cell), -1)
            teacher = torch.log_softmax(repeated_prefix_logits(make_model("qwen3_moe", seed=7 + d), cell), -1)
            ratios[domain] = (teacher - student).gather(1, label[:, None])[:, 0]
    everything = torch.cat(list(ratios.values())).std(correction=0)
    step.objective.bounds = (0.0, math.inf)  # nothing is masked
    report = step(rows, shares=SHARES)
    for domain, ratio in ratios.items():
        assert report.metrics["balance"][domain] == pytest.approx(
            (everything / ratio.std(correction=0)).item(), rel=1e-3
        )
    assert int(step.learner.expert_loads.take().sum()) == 0
    step.learner.close()


def test_what_does_not_fit_is_refused():
    teacher = HFTeacher(make_model("qwen3_moe"), teacher="t")
    with pytest.raises(MissingScorer, match="no teacher scores science"):
        build({"game": teacher})

    def sampled_only(batch, *, need, temperature):
        return Scores("server", torch.zeros(batch.loss_tokens))

    step = build({d: sampled_only for d in DOMAINS})
    with pytest.raises(ValueError, match="'server' gives the sampled token's score only"):
        step(rows_of(), shares=SHARES)
    with pytest.raises(ValueError, match="no share is configured for domain 'science'"):
        build(model=step.learner.model)(rows_of(), shares={"game": 1.0})


def test_padded_output_matrices_share_the_ids_that_both_have():
    wide = HFTeacher(make_model("qwen3_moe", seed=7), teacher="t")
    narrow = HFTeacher(make_model("qwen3_moe", seed=7), teacher="t", vocabulary=59)
    (batch,) = pack(
        [rollout_row(np.random.default_rng(0), size=20, turns=2)],
        token_budget=100,
        pad_id=0,
        domains=DOMAINS,
        streams=STREAMS,
    )
    batch.label.clamp_(max=58)
    assert torch.equal(narrow(batch).logits, wide(batch).logits[:, :59])
    expected = torch.log_softmax(wide(batch).logits[:, :59], -1).gather(1, batch.label[:, None])[:, 0]
    torch.testing.assert_close(narrow(batch).logprob, expected)
    batch.label[0] = 60
    with pytest.raises(ValueError, match="has 59 ids, but the student wrote id 60"):
        narrow(batch)


OPTIONS = (
    {},
    {"balance": "normalised", "objective": "mopd", "aggregation": "turn_mean"},
    {"training": {"prefix_gradient": "none", "zero_stage": 3, "logits_mib": 0.01}, "balance": "normalised"},
    {"scorers": "log_space", "objective": "jsd", "objective_options": {"support": "top_k", "k": 5, "beta": 0.02},
     "aggregation": "prompt_mean", "turn_scores": True},
)


def cut_rows():
    """rows_of, sampled under top-k: most tokens with a candidate set, actions without any among them."""
    rng = np.random.default_rng(3)

    def cut(action):
        if rng.random() < 0.2:
            return action
        sets = [None if rng.random() < 0.2 else np.unique([*rng.integers(2, 61, 5), token]).astype(np.int32)
                for token in action.tokens]
        return dataclasses.replace(action, candidates=tuple(sets), behaviour_logprob=action.behaviour_logprob + 1)
    return [dataclasses.replace(row, actions=tuple(map(cut, row.actions))) for row in rows_of()]


def splits(number, rows):
    """How many rows rank 0 has, of each step of OPTIONS[number]: some, and with the first options all."""
    return (3, len(rows)) if number == 0 else (3,)


def rows_for(number):
    """Candidate sets where the balance reads log-ratios, so that those are renormalised too."""
    return cut_rows() if number == 1 else rows_of()
RANKS = """
import json, os
from tests.mopd.learner.test_step import *
rank = int(os.environ["RANK"])
found = []
for number, options in enumerate(OPTIONS):
    rows = rows_for(number)
    step = build(**options)
    for split in splits(number, rows):
        report = step(rows[:split] if rank == 0 else rows[split:], shares=SHARES, step=0)
        found.append(comparable(report))
if rank == 0:
    print("RESULT" + json.dumps(found), flush=True)
torch.distributed.barrier()
torch.distributed.destroy_process_group()  # or gloo's threads may still run when the process ends
"""


def comparable(report):
    game = report.metrics["domains"]["game"]
    return [
        report.loss,
        report.metrics["gradient_norm"],
        report.reverse_kl["game"],
        report.reverse_kl["science"],
        game["k1"],
        game["effective_sample_size"],
        game["mismatch_max"],
        game["tokens"],
        game["actions"],
        game["cut_share"],
        game.get("candidates_mean", 0.0),
        *report.metrics["balance"].values(),
        *(value for scores in report.turn_scores.values() for value in scores.values()),
    ]


@pytest.mark.timeout(900)
def test_two_ranks_give_one_process_numbers(tmp_path):
    expected = []
    for number, options in enumerate(OPTIONS):
        rows = rows_for(number)
        step = build(**options)
        for _ in splits(number, rows):
            expected.append(comparable(step(rows, shares=SHARES, step=0)))
        step.learner.close()
    assert expected[2][9] > 0 and len(expected[-1]) > len(expected[0])  # sets and turn scores are among what is compared
    # Several times what it takes alone: others may run on the machine too.
    out = run_python(RANKS, processes=2, timeout=600, SCRATCH=str(tmp_path))
    found = json.loads(out[out.index("RESULT") + 6 :])
    for mine, theirs in zip(expected, found, strict=True):
        assert theirs == pytest.approx(mine, rel=5e-4, abs=1e-6)


@pytest.mark.parametrize("objective, options", [
    ("forward_kl", {}), ("reverse_kl", {"support": "top_k", "k": 5}), ("mopd", {}), ("sampled_kl", {}),
    ("tests.mopd.learner.test_step:total_variation", {}),
])  # fmt: skip
def test_the_size_of_the_chunks_changes_nothing(objective, options):
    """Some tokens a chunk, or all at once: the same loss, gradient and numbers, for objectives of one's own too."""
    found = []
    for mib in (0.004, 256.0):
        step = build(objective=objective, objective_options=options, training={"logits_mib": mib})
        calls = []
        inner = step._loss
        step._loss = lambda logits, batch, inner=inner, calls=calls: calls.append(len(logits)) or inner(logits, batch)
        report = step(rows_of(), shares=SHARES)
        step.learner.close()
        numbers = {f"{s}/{k}": v for s, cell in report.metrics["streams"].items()
                   for k, v in (cell | cell["diagnostics"]).items() if k not in ("depth", "diagnostics")}
        found.append((report.loss, report.metrics["gradient_norm"], numbers))
        assert max(calls) <= 4 if mib < 1 else max(calls) > 30
    assert found[0][:2] == pytest.approx(found[1][:2], rel=1e-5)
    assert found[0][2] == pytest.approx(found[1][2], rel=1e-4, abs=1e-6)


def total_variation():
    """An objective as docs/architecture.md shows it: it wants logits and knows nothing of chunks."""

    def objective(*, student_logits, teacher_logits, label, **_):
        loss = 0.5 * (student_logits.softmax(-1) - teacher_logits.softmax(-1)).abs().sum(-1)
        return ObjectiveResult(loss, diagnose(student_logits, teacher_logits, label))

    objective.needs = "full"
    return objective


def test_a_teacher_that_answers_with_logits_gives_the_same_as_one_with_hidden_states():
    """Both forms of a whole distribution, and a narrower output matrix."""
    reports = []
    for kind in ("hidden", "full"):
        scorers = {}
        for i, domain in enumerate(DOMAINS):
            teacher = HFTeacher(make_model("qwen3_moe", seed=7 + i), teacher="t", vocabulary=61)
            scorers[domain] = teacher if kind == "hidden" else (
                lambda batch, *, need, temperature, teacher=teacher: teacher(batch, need=need, temperature=temperature))
        step = build(scorers, objective="jsd", balance="normalised")
        reports.append(step(rows_of(), shares=SHARES))
        assert bool(step._heads) == (kind == "hidden")
        step.learner.close()
    a, b = reports
    assert a.loss == pytest.approx(b.loss, rel=1e-5) and a.metrics["balance"] == pytest.approx(b.metrics["balance"], rel=1e-4)
    assert a.metrics["gradient_norm"] == pytest.approx(b.metrics["gradient_norm"], rel=1e-5)
    assert a.reverse_kl == pytest.approx(b.reverse_kl, rel=1e-4)


def test_what_the_objective_masks_is_not_in_the_balance():
    """METHOD section 3: σ is that of unmasked tokens. Masked in a domain's rows, tokens count as if they were not there."""
    rows = [rollout_row(np.random.default_rng(i), size=20, turns=3, domain=DOMAINS[i % 2], group=i) for i in range(4)]
    near = {"correction": "mask", "bounds": [1e-6, 1e6]}

    def far(row):
        first, *rest = row.actions
        first = dataclasses.replace(first, behaviour_logprob=np.full(len(first.tokens), -60, np.float32))
        return dataclasses.replace(row, actions=(first, *rest))
    found = []
    for given in ([far(rows[0]), *rows[1:]], [dataclasses.replace(rows[0], actions=rows[0].actions[1:]), *rows[1:]], rows):
        step = build(objective="mopd", objective_options=near, balance="normalised")
        found.append(step(given, shares=SHARES).metrics["balance"])
        step.learner.close()
    assert found[0] == pytest.approx(found[1], rel=1e-6) and found[0] != pytest.approx(found[2], rel=1e-3)
