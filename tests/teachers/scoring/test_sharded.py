"""A teacher that is split over two real processes scores as the whole one does, whatever rows each process has."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from mopd.config_teachers import TeacherConfig, teacher_errors
from mopd.learner.packing import pack
from mopd.rows import STREAMS
from teachers.registry import TeacherRegistry, TeacherSpec
from teachers.scoring.hf import HFTeacher
from teachers.scoring.mixture import MixtureScorer
from teachers.scoring.sharded import ShardedTeacher
from tests.mopd.learner.test_engine import run_python
from tests.mopd.learner.test_step import DOMAINS, SHARES, build, rows_of
from tests.mopd.learner.tiny import VOCABULARY, make_model

RUN = '''
import json, os
from tests.teachers.scoring.test_sharded import *
found = on_a_rank(int(os.environ["RANK"]))
everyone = [None, None]
torch.distributed.all_gather_object(everyone, found)
if os.environ["RANK"] == "0":
    print("RESULT" + json.dumps(everyone), flush=True)
torch.distributed.barrier()
torch.distributed.destroy_process_group()
'''
# Rows of rank 0, of all: some, none, all. Objectives that read whole distributions, and the sampled token's score alone.
CASES = [
    (5, {"objective": "jsd", "balance": "normalised"}), (0, {"objective": "mopd"}),
    (99, {"objective": "forward_kl", "training": {"zero_stage": 3}}),
    (5, {"objective": "reverse_kl", "training": {"zero_stage": 3, "prefix_gradient": "none"}}),
]


KINDS = {
    "qwen3_moe": {}, "gemma2": {"offload": True}, "qwen3": {"dtype": torch.bfloat16, "padding": 6},
}  # mixture of experts; tied, soft-capped, in the host's memory; low precision, an output matrix wider than the vocabulary


def teacher(seed, *, sharded, family="qwen3_moe", dtype=torch.float32, padding=0, **more):
    model = make_model(family, seed=seed)
    if padding:
        torch.manual_seed(seed)
        model.resize_token_embeddings(VOCABULARY + padding, mean_resizing=False)
        more["vocabulary"] = VOCABULARY
    model = model.to(dtype)
    return (ShardedTeacher if sharded else HFTeacher)(model, teacher=f"t{seed}", **more)


def step_numbers(rank, at, options, sharded):
    """Loss, gradient norm and the change of the weights by two steps of a LearnerStep with one teacher that is split (or
    not) and a mixture of it with a whole one."""
    first, second = teacher(7, sharded=sharded), teacher(8, sharded=False)
    scorers = {"game": first, "science": MixtureScorer([second, first], [1, 3])}
    step = build(scorers, **{**options, "training": dict(options.get("training", {}))})
    rows, found = rows_of(), []
    for _ in range(2):
        report = step(rows[:at] if rank == 0 else rows[at:], shares=SHARES)
        found += [report.loss, report.metrics["gradient_norm"], *report.reverse_kl.values(),
                  *report.metrics["balance"].values()]
        if sharded:
            assert first._gathered is None and not step._heads, "the head is released"
            assert all(p.numel() == 0 for p in first.model.parameters()), "nothing stays gathered"
    for scorer in scorers.values():
        scorer.check_unchanged()
    learner = step.learner
    learner.close()
    weights = torch.cat([p.detach().flatten() for p in learner.model.parameters()])
    first.close()
    return [*found, float(weights.norm()), *weights[::997].tolist()]


def scores_of(scorer, batches, need, temperature=0.7):
    found = []
    for batch in batches:
        scores = scorer(batch, need=need, temperature=temperature)
        parts = [scores.logprob] if need == "sampled" else [scores.logits] if need == "full" else [
            scores.head.logits(scores.hidden)]
        found += parts
    return found


def on_a_rank(rank):
    from mopd.learner.engine import start_processes
    from mopd.learner.packing import empty_micro_batch

    torch.set_num_threads(1)
    start_processes()
    found = {}
    for family, kind in KINDS.items():
        split, whole = (teacher(3, sharded=sharded, family=family, **kind) for sharded in (True, False))
        own = rows_of()[:3] if rank == 0 else []
        batches = pack(own, token_budget=60, pad_id=0, domains=DOMAINS, streams=STREAMS)
        calls = len(batches)
        counts = [None, None]
        torch.distributed.all_gather_object(counts, calls)
        batches += [empty_micro_batch(0)] * (max(counts) - calls)
        far = 0.0
        for need in ("sampled", "full", "hidden"):
            # Asked for logits, the whole model rounds them to its own precision; the split one's head does not.
            asked = "hidden" if need == "full" and "dtype" in kind else need
            pairs = zip(scores_of(split, batches, need), scores_of(whole, batches, asked), strict=True)
            assert split.ids == whole.ids == VOCABULARY
            far = max([far, *(float((a - b).abs().max()) for a, b in pairs if a.numel())])
            split.rest()
        total = sum(p.numel() for p in whole.model.parameters())
        split.check_unchanged()
        planted = next(p for p in split.model.parameters() if p.ds_tensor.numel() > 4).ds_tensor
        planted.data[0] += 1
        try:
            split.check_unchanged()
            noticed = ""
        except RuntimeError as error:
            noticed = str(error)
        found[family] = {"calls": counts, "far": far, "share": split.elements / total, "noticed": noticed,
                         "left": sum(p.numel() for p in split.model.parameters())}
        split.close()
    found["steps"] = [[step_numbers(rank, at, options, sharded) for sharded in (False, True)] for at, options in CASES]
    return found


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    out = run_python(RUN, processes=2, timeout=500, SCRATCH=str(tmp_path_factory.mktemp("two")))
    return json.loads(out[out.index("RESULT") + 6:])


@pytest.mark.timeout(600)
@pytest.mark.parametrize("family", KINDS)
def test_scores_are_those_of_the_whole_teacher(two, family):
    for rank in two:
        assert rank[family]["calls"][0] > 1 and rank[family]["calls"][1] == 0, "one rank has work, the other none"
        assert rank[family]["far"] <= 1e-6


@pytest.mark.timeout(600)
@pytest.mark.parametrize("family", KINDS)
def test_each_rank_keeps_half(two, family):
    for rank in two:
        assert rank[family]["share"] == pytest.approx(0.5, abs=0.01) and rank[family]["left"] == 0
        assert "the weights of teacher 't3' changed" in rank[family]["noticed"]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", range(len(CASES)))
def test_a_step_learns_the_same(two, case):
    for rank in two:
        whole, split = rank["steps"][case]
        assert np.isfinite(whole).all() and split == pytest.approx(whole, rel=1e-6, abs=1e-7)


def test_alone_it_is_whole_and_said_so(monkeypatch, capsys):
    monkeypatch.setattr("teachers.registry.load_model", lambda *_, **__: make_model("qwen3"))
    registry = TeacherRegistry([TeacherSpec("t", "folder", shard=True)], {"game": "t"})
    scorer = registry.scorer(registry.route.teachers[0])
    assert type(scorer) is HFTeacher and "teachers.t.shard has no effect on one rank" in capsys.readouterr().err


def test_what_cannot_be_split_is_refused():
    model = make_model("qwen3_moe")
    for layer in model.model.layers:
        layer.mlp.experts = torch.nn.ModuleList([torch.nn.Linear(32, 32) for _ in range(4)])
    with pytest.raises(ValueError, match="teacher 't' cannot be split over ranks: its experts .* are modules of their own"):
        ShardedTeacher(model, teacher="t")
    model = make_model("qwen3")
    model.lm_head.__class__ = type("Head", (torch.nn.Linear,), {"forward": lambda self, hidden: hidden})
    with pytest.raises(ValueError, match="its output head is no plain linear layer. Leave teachers.t.shard out"):
        ShardedTeacher(model, teacher="t")
    assert "teachers.t.shard: the back end 'vllm' does not read it" in "".join(
        teacher_errors("t", TeacherConfig("x", backend="vllm", shard=True)))
    assert "teachers.t.shard: a teacher under teachers.t.cross_tokenizer" in "".join(
        teacher_errors("t", TeacherConfig("x", cross_tokenizer=True, shard=True)))
