"""A run that samples under top-p and top-k: what student, teachers, records and the store make of the candidate sets."""

from __future__ import annotations

import shutil

import pytest

from mopd.check import check_launch
from mopd.run import train
from mopd.sampling.contexts import CANDIDATES, candidates_of
from prefix_store import PrefixStore
from teachers.collect import collect_domain
from tests.tiny_run import records

pytestmark = pytest.mark.timeout(900)


@pytest.mark.parametrize("objective,steps", [("mopd", 2), ("forward_kl", 1)])
def test_the_ratio_is_one_in_a_whole_run(tiny_run, tmp_path, objective, steps):
    """Rollouts, fresh turns and sequences that go on from stored points; one domain has a mixture of teachers."""
    train(tiny_run.config(
        f"run={tmp_path}", "train.top_p=0.9", "train.top_k=40", "train.temperature=0.8", f"train.steps={steps}",
        "train.samples_per_step=4", f"train.objective={objective}",
        "domains.game.resume_turns=2", "domains.game.teacher_weights={game: 1, embodied: 3}"))
    lines = records(tmp_path / "students" / "student_mixed" / "seed-1")
    assert len(lines) == steps
    for line in lines:
        for numbers in line["domains"].values():
            assert numbers["mismatch_max"] < 1e-4 and numbers["unscored_share"] == 0 and numbers["masked_share"] == 0
            assert numbers["effective_sample_size"] == pytest.approx(1, abs=1e-6)
            assert numbers["cut_share"] > 0.9 and 1 <= numbers["candidates_mean"] <= 40


def test_what_a_teacher_plays_under_top_p_keeps_its_sets(tiny_run, tmp_path):
    shutil.copytree(tiny_run.folder / "store", tmp_path / "store")
    config = tiny_run.config(f"run={tmp_path}", f"store={tmp_path}/store", "collect.top_p=0.8", "collect.top_k=30")
    with PrefixStore.open(config.store) as store:
        before = set(store.ids())
    collect_domain(config, "embodied")
    with PrefixStore.open(config.store) as store:
        added = [store.sequence(identity) for identity in store.ids() if identity not in before]
    assert added
    for sequence in added:
        for context in sequence.contexts:
            assert set(context.extras) == {CANDIDATES}
            for segment in context.actions():
                sets = candidates_of(context, segment.start, segment.end)
                tokens = context.tokens[segment.start : segment.end]
                assert all(ids is None or (len(ids) <= 30 and token in ids) for token, ids in zip(tokens, sets, strict=True))


def test_a_launch_refuses_values_and_parts_that_do_not_fit(tiny_run):
    from mopd.config import ConfigError

    with pytest.raises(ConfigError) as caught:
        tiny_run.config("train.top_p=0", "train.top_k=-1", "collect.top_p=1.5")
    said = str(caught.value)
    assert "train.top_p: 0 leaves nothing to sample from" in said
    assert "train.top_k: -1 must be at least 0" in said and "collect.top_p: 1.5 must be between 0 and 1" in said
    unaware = "train.objective=tests.mopd.learner.test_candidates:Unaware"
    errors = check_launch(tiny_run.config("train.top_p=0.5", unaware, "train.objective_options={needs: sampled}"))["errors"]
    assert len(errors) == 1 and "takes no `candidates`" in errors[0]
    assert check_launch(tiny_run.config("train.top_p=0.5", unaware))["errors"] == []
