"""The demo's base model from transcripts, and a domain's demonstrations."""

from __future__ import annotations

import json

import pytest

from mopd.base_model import make_base
from mopd.config import ConfigError
from mopd.domains import demonstrate_domain, open_domains
from mopd.learner.model import load_model
from mopd.progress import Progress
from mopd.sampling.rendering import ChatRenderer, load_tokenizer
from tests.tiny_run import same_weights

SMALL = ("base={vocabulary: 300, hidden: 32, layers: 2, experts: 4, expert_intermediate: 16, steps: 4, rows_per_step: 4}",)


@pytest.fixture
def transcripts(tiny_run):
    return [tiny_run.folder / f"{name}.jsonl" for name in ("embodied", "game")]


def test_a_base_model_is_an_ordinary_folder(tiny_run, transcripts, tmp_path, capsys):
    make_base(tiny_run.config(*SMALL), transcripts, tmp_path / "base")
    model, tokenizer = load_model(tmp_path / "base"), load_tokenizer(tmp_path / "base")
    assert model.config.num_experts == 4 and model.config.vocab_size == len(tokenizer) <= 300
    assert ChatRenderer(tokenizer).end_id == tokenizer.eos_token_id
    assert "18 episodes" in capsys.readouterr().out and not (tmp_path / "base.checkpoints").exists()
    make_base(tiny_run.config(*SMALL), transcripts, tmp_path / "again")
    assert same_weights(tmp_path / "base", tmp_path / "again")
    make_base(tiny_run.config(*SMALL, "seed=2"), transcripts, tmp_path / "other")
    assert not same_weights(tmp_path / "base", tmp_path / "other")


def test_shares_of_the_experts_text(tiny_run, transcripts, tmp_path, capsys):
    make_base(tiny_run.config(*SMALL, "base.expert_shares={embodied: 0.5, game: 0.5}"), transcripts, tmp_path / "base")
    assert " 9 episodes" in capsys.readouterr().out


def test_what_an_interrupted_config_left_is_not_taken_by_another(tiny_run, transcripts, tmp_path, monkeypatch):
    import mopd.base_model as module
    from mopd.learner.checkpoint import own_folder
    kept = []

    class Stopping(Progress):
        def update(self, done, text=""):
            super().update(done, text)
            if done == 3:
                raise KeyboardInterrupt

    def remember(folder, identity, **options):
        kept.append(own_folder(folder, identity, **options))
        return kept[-1]
    monkeypatch.setattr(module, "own_folder", remember)
    monkeypatch.setattr(module, "Progress", Stopping)
    for changes in (SMALL, SMALL, (*SMALL, "base.rows_per_step=3"), (*SMALL, "domains.game.share=3")):
        with pytest.raises(KeyboardInterrupt):
            make_base(tiny_run.config(*changes), transcripts, tmp_path / "base")
    assert kept[0] == kept[1] and len(set(kept)) == 3


def test_missing_text_is_an_error(tiny_run, transcripts, tmp_path):
    with pytest.raises(ConfigError, match="no transcript of game in"):
        make_base(tiny_run.config(*SMALL), transcripts[:1], tmp_path / "base")
    with pytest.raises(ConfigError, match="--transcripts"):
        make_base(tiny_run.config(*SMALL), [], tmp_path / "base")


def test_demonstrations_are_told_what_rollouts_are_told(tiny_run, tmp_path, capsys):
    config = tiny_run.config("domains.embodied.system_prompt=Walk well.", "domains.embodied.novice_episodes=3",
                             "domains.embodied.max_turns=12")
    demonstrate_domain(config, "embodied", tmp_path / "t.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "t.jsonl").read_text().splitlines()]
    assert {line["system"] for line in lines} == {"Walk well."}
    by_novice = [line for line in lines if line["source"]["id"] == "embodied-novice"]
    by_expert = [line for line in lines if line["source"]["id"] == "embodied-expert"]
    assert len(by_novice) == 3 and by_expert and all(line["success"] for line in by_expert)
    assert not {line["seed"] for line in by_novice} & {line["seed"] for line in by_expert}, "novices play tasks of their own"
    assert "novice: 3 of 3 episodes kept" in capsys.readouterr().out
    domains = open_domains(config)
    assert domains["embodied"].harness.system_prompt == "Walk well." and domains["game"].harness.system_prompt
    for domain in domains.values():
        domain.close()


def test_an_expert_that_solves_nothing_is_an_error(tiny_run, tmp_path):
    with pytest.raises(ConfigError, match="domains.game: the expert solved none of 6 training tasks: {'turn_limit': 6}"):
        demonstrate_domain(tiny_run.config("domains.game.max_turns=1"), "game", tmp_path / "t.jsonl")
    assert not (tmp_path / "t.jsonl").exists()


def test_tasks_are_drawn_by_their_seed_alone(tiny_run):
    (domain,) = open_domains(tiny_run.config(), ["embodied"]).values()
    tasks = domain.tasks("train")
    assert domain.draw("train", 1, 2, 3) == domain.draw("train", 1, 2, 3)
    assert len({domain.draw("train", 1, step, 0) for step in range(40)}) > 20
    assert domain.spread("train", 0) == tasks and len(domain.spread("train", 10**6)) == len(tasks)
    spread = domain.spread("train", 7)
    assert len(set(spread)) == 7 and spread == sorted(spread, key=tasks.index)
    domain.close()
