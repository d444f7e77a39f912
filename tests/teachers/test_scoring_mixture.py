"""Several teachers as one scorer: the same mixture by every way of asking, missing scores, training, and the registry."""

from __future__ import annotations

import json

import pytest
import torch

from mopd.losses.mixture import mixture_logits
from teachers.registry import Mixture, TeacherError, TeacherRegistry, TeacherSpec, route
from teachers.scoring import HFTeacher, MixtureScorer, TeacherScorer
from tests.mopd.learner.test_step import DOMAINS, SHARES, build, rows_of
from tests.mopd.learner.tiny import make_model
from tests.teachers.test_scoring_hf import one_batch


def teachers(names=("a", "b")):
    return [HFTeacher(make_model("qwen3_moe", seed=7 + i), teacher=name) for i, name in enumerate(names)]


@pytest.mark.parametrize("kind", ["probability", "log_space"])
def test_logits_scores_and_hidden_states_agree(kind):
    _, batch = one_batch()
    members, temperature = teachers(), 0.7
    mixture = MixtureScorer(members, [1, 3], kind)
    assert isinstance(mixture, TeacherScorer) and mixture.gives == {"sampled", "full", "hidden"}
    assert mixture.teacher == "0.25 a + 0.75 b" and mixture.weights == (0.25, 0.75)
    want = mixture_logits([m(batch, need="full").logits for m in members], (0.25, 0.75), kind, temperature)
    label = torch.log_softmax(want / temperature, -1).gather(1, batch.label[:, None])[:, 0]
    full, sampled, hidden = (mixture(batch, need=need, temperature=temperature) for need in ("full", "sampled", "hidden"))
    torch.testing.assert_close(full.logits, want)
    torch.testing.assert_close(full.logprob, label)
    torch.testing.assert_close(sampled.logprob, label, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(hidden.head.logits(hidden.hidden), want, rtol=1e-4, atol=1e-5)
    assert sampled.logits is None and hidden.logits is None and hidden.logprob is None and not full.missing
    for member in members:  # a head of its own kind: answers with logits alone
        member.head = None
    again = MixtureScorer(members, [1, 3], kind)
    assert again.gives == {"sampled", "full"}
    torch.testing.assert_close(again(batch, need="hidden", temperature=temperature).logits, want)
    torch.testing.assert_close(again(batch, need="sampled", temperature=temperature).logprob, label, rtol=1e-4, atol=1e-5)
    mixture.check_unchanged()


class Lossy:
    """A teacher some of whose answers do not come back."""

    def __init__(self, inner, lost):
        self.inner, self.lost = inner, lost
        self.teacher, self.gives, self.head, self.ids = inner.teacher, inner.gives, inner.head, inner.ids

    def __call__(self, batch, *, need, temperature=1.0):
        scores = self.inner(batch, need=need, temperature=temperature)
        for value in (scores.logprob, scores.logits, scores.hidden):
            if value is not None:
                value[self.lost] = float("nan")
        scores.missing["timeout"] += len(self.lost)
        return scores


def test_a_score_that_one_member_lacks_is_missing_once():
    _, batch = one_batch()
    good, bad, worse = teachers(("good", "bad", "worse"))
    members = [good, Lossy(bad, [3, 5]), Lossy(worse, [5, 8, 9])]
    for kind in ("probability", "log_space"):
        for need in ("full", "sampled", "hidden"):
            scores = MixtureScorer(members, [1, 1, 1], kind)(batch, need=need)
            assert (~scores.scored()).nonzero()[:, 0].tolist() == [3, 5, 8, 9]
            assert scores.missing == {"bad: timeout": 2, "worse: timeout": 2}


def test_a_step_trains_towards_the_mixture_and_not_towards_one():
    rows = rows_of()
    found = {}
    for name, weights in (("both", [1, 3]), ("first", [1, 1e-9]), ("second", [1e-9, 1])):
        step = build({d: MixtureScorer(teachers(), weights, "log_space") for d in DOMAINS}, objective="reverse_kl")
        found[name] = step(rows, shares=SHARES)
        step.learner.close()
    alone = {}
    for name, scorer in zip(("first", "second"), teachers(), strict=True):
        step = build({d: scorer for d in DOMAINS}, objective="reverse_kl")
        alone[name] = step(rows, shares=SHARES)
        step.learner.close()
        assert found[name].loss == pytest.approx(alone[name].loss, rel=1e-4)
        assert found[name].metrics["gradient_norm"] == pytest.approx(alone[name].metrics["gradient_norm"], rel=1e-3)
    # KL to the pool in log space is the weighted sum of the KLs less a constant that is not negative
    assert found["both"].loss < 0.25 * alone["first"].loss + 0.75 * alone["second"].loss
    assert found["both"].metrics["domains"]["game"]["unscored_tokens"] == 0


def test_members_that_do_not_fit_are_refused():
    class Server:
        teacher, gives = "server", frozenset({"sampled"})

    one = teachers(("a",))[0]
    with pytest.raises(ValueError, match="needs whole distributions, and server gives the sampled token's score only"):
        MixtureScorer([one, Server()], [1, 1], "log_space")
    for weights in ([1, 0], [1], [1, float("nan")]):
        with pytest.raises(ValueError, match="one positive weight per teacher"):
            MixtureScorer([one, one], weights)
    narrow = HFTeacher(make_model("qwen3_moe"), teacher="narrow", vocabulary=59)
    with pytest.raises(ValueError, match=r"different numbers of ids \(a 61, narrow 59\)"):
        MixtureScorer([one, narrow], [1, 1])


def test_the_registry_loads_each_checkpoint_once_and_says_who_serves_whom(make_folder, tokenizer):
    specs = [TeacherSpec("a", str(make_folder(1))), TeacherSpec("b", str(make_folder(2))), TeacherSpec("c", "m/c")]
    mixtures = {"game": Mixture({"a": 1.0, "b": 3.0}, "log_space"), "web": Mixture({"a": 1.0, "b": 3.0}, "log_space")}
    with pytest.warns(UserWarning, match="no domain uses teacher c"):
        registry = TeacherRegistry(specs, {"game": "a", "web": "a", "science": "b"}, mixtures=mixtures)
    assert [t.id for t in registry.route.teachers] == ["a", "b"]
    assert registry.handshake(tokenizer) == len(tokenizer)
    scorers = registry.scorers()
    assert scorers["game"] is scorers["web"] and scorers["game"].members[1] is scorers["science"]
    assert scorers["game"].kind == "log_space" and scorers["game"].weights == (0.25, 0.75)
    manifest = registry.manifest()
    json.dumps(manifest)
    assert manifest["teachers"]["b"]["domains"] == ["game", "web", "science"] and manifest["unused"] == ["c"]
    assert manifest["mixtures"]["game"] == {"kind": "log_space", "weights": {"a": 1.0, "b": 3.0}}
    next(scorers["game"].members[0].model.parameters()).data.add_(1e-3)
    with pytest.raises(RuntimeError, match="weights of teacher 'a' changed"):
        registry.check_unchanged()
    registry.close()
    with pytest.raises(TeacherError, match=r"names teacher 'd' in its mixture, which is not configured.*the weight 0"):
        route(specs, {"game": "a"}, {"game": Mixture({"d": 1.0, "a": 0.0})})
