"""A sampler process: what it samples, how weights reach it, and that its end leaves nothing behind and loses nothing."""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing.connection
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from mopd.domains import close_domains, open_domains
from mopd.learner.model import load_model
from mopd.mixer_events import GroupId
from mopd.processes import marked
from mopd.sampling.continuous import ContinuousLoop
from mopd.sampling.hf import HFEngine
from mopd.sampling.rendering import ChatRenderer
from mopd.sampling.sampler import Sampler, SamplerFault, SamplerSpec, wait_ready
from mopd.sampling.sampler_process import MARK
from mopd.sampling.weight_folder import Probe, WeightFolder
from mopd.sampling.work import Done, Lost, Ready, TookWeights, Work
from mopd.sampling.works import Works
from prefix_store import PrefixStore
from tests.tiny_run import REPOSITORY, environment


@contextlib.contextmanager
def started(config, log: Path, **options):
    sampler = Sampler(SamplerSpec(config, options.pop("number", 0), log, **options)).start()
    try:
        yield sampler
    finally:
        sampler.kill()


@pytest.fixture(scope="module")
def config(tiny_run):
    return tiny_run.config("sampling.overlap=1", "sampling.sampler_timeout=60")


@pytest.fixture(scope="module")
def sampler(config, tmp_path_factory):
    """One that is ready, for all tests that do it no harm."""
    with started(config, tmp_path_factory.mktemp("sampler") / "sampler-0.log") as one:
        yield one


def news_of(sampler, count, timeout=240.0, kind=Done):
    """The next `count` news of a kind; others are returned beside them."""
    found, others, deadline = [], [], time.monotonic() + timeout
    while len(found) < count:
        assert time.monotonic() < deadline, (found, others, sampler.doing)
        for news in sampler.poll(0.2):
            (found if isinstance(news, kind) else others).append(news)
    return found, others


def gone(pid: int, within: float = 30.0) -> bool:
    deadline = time.monotonic() + within
    while time.monotonic() < deadline:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, 0)
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
                time.sleep(0.05)
                continue
        return True
    return False


def under(sampler) -> list[int]:
    """Processes that it started, whatever session they are in."""
    return marked(MARK, sampler._mark)


def rollouts(count, domain="embodied", first=0):
    return [Work(GroupId(f"{domain}/rollout", first + n), 0) for n in range(count)]


def tokens_of(done):
    return [(a.at, a.turn, a.tokens.tolist()) for row in done.rows for a in row.actions]


def test_it_gets_ready_and_samples_what_a_loop_in_this_process_samples(sampler, config, capsys):
    wait_ready([sampler])
    assert sampler.ready and sampler.alive and sampler.slots == config.train.sampling_batch
    assert sampler.kv_tokens == sampler.slots * 1024 and sampler.doing == "sampling"
    assert "1 of 1 samplers: " in capsys.readouterr().err
    with contextlib.closing(PrefixStore.open(config.store)) as store:
        index = store.index()
        points = [index.point(row) for row in index.rows("embodied")[:4]]
        works = [*rollouts(5), *rollouts(3, "game"),
                 *(Work(GroupId("embodied/sft_prefix", 0), n, p) for n, p in enumerate(points))]
        sampler.give(works)
        assert sampler.in_flight == len(works) == len(sampler.works)
        assert multiprocessing.connection.wait([sampler], 30) == [sampler]
        found, others = news_of(sampler, len(works))
        assert [type(news) for news in others] == [Ready] and sampler.in_flight == 0
        torch.set_num_threads(1)
        model, domains = load_model(config.student.model), open_domains(config)
        try:
            from mopd.sampling.rendering import load_tokenizer

            renderer = ChatRenderer(load_tokenizer(config.student.model))
            loop = ContinuousLoop(HFEngine(model, verify=False), Works(
                domains=domains, store=store, renderer=renderer, fingerprint=renderer.fingerprint(), seed=config.seed,
                student="s"))
            loop.give(works)
            here = {}
            while loop.in_flight:
                here |= {news.work: news for news in loop.turn(0.1)}
            loop.close()
        finally:
            close_domains(domains)
    for done in found:
        assert tokens_of(done) == tokens_of(here[done.work]) and done.record["sampled_tokens"] > 0
        assert all((a.version == 0).all() for row in done.rows for a in row.actions)
    deadline = time.monotonic() + 5
    while not sampler.busy_seconds and time.monotonic() < deadline:
        time.sleep(0.05)
    assert sampler.busy_seconds > 0 and sampler.stats["sampled_tokens"] > 0
    assert sampler.stats["environments"] == {"embodied": {"failures": {}}, "game": {"failures": {}, "java": {"started": 1}}}


def test_a_work_is_given_once_and_what_is_cancelled_is_not_heard_of(sampler):
    wait_ready([sampler], quiet=True)
    gone, stays = rollouts(20, first=100), rollouts(2, first=200)
    sampler.give(gone)
    with pytest.raises(ValueError, match="embodied/rollout#100, sequence 0, was given to sampler 0 before"):
        sampler.give(gone[:1])
    sampler.cancel(gone[3:])
    again = dataclasses.replace(gone[3], attempt=1)
    sampler.give([*stays, again])
    found, _ = news_of(sampler, 6)
    assert {news.work for news in found} == {*gone[:3], *stays, again} and sampler.in_flight == 0


def named(model):
    return list(model.named_parameters())


def probe_of(model, limit=1e-3):
    tokens = np.arange(5, 25, dtype=np.uint32)
    with torch.no_grad():
        logprob = torch.log_softmax(model(input_ids=torch.from_numpy(tokens.astype(np.int64))[None]).logits[0], -1)
    return Probe(tokens, logprob[torch.arange(19), torch.from_numpy(tokens[1:].astype(np.int64))].numpy(), limit)


@pytest.fixture
def place(tmp_path):
    return WeightFolder(tmp_path / "weights")


def test_it_takes_the_newest_weights_and_proves_them(sampler, config, place):
    wait_ready([sampler], quiet=True)
    other = load_model(f"{config.run}/teachers/game")
    for version in (1, 2):
        place.write(named(other), version, probe=probe_of(other))
    works = rollouts(30, first=300)
    sampler.give(works[:15])
    sampler.take_weights(place.path(1), 1)
    sampler.take_weights(place.path(2), 2)
    found, others = news_of(sampler, 15)
    while not (others and others[-1].version == 2):
        others += news_of(sampler, 1, kind=TookWeights)[0]
    assert all(news.gap < 1e-3 and news.seconds > 0 for news in others) and sampler.version == 2
    sampler.give(works[15:])
    later, _ = news_of(sampler, 15)
    versions = [{v for row in done.rows for a in row.actions for v in a.version.tolist()} for done in later]
    assert versions == [{2}] * 15
    for done in found:  # what was under way went on
        seen = np.concatenate([a.version for row in done.rows for a in row.actions])
        assert set(seen.tolist()) <= {0, 1, 2} and (np.diff(seen) >= 0).all()


def test_a_killed_sampler_gives_back_its_works_and_leaves_no_process(config, tmp_path):
    with started(config, tmp_path / "s.log", number=3) as sampler:
        wait_ready([sampler], quiet=True)
        children = under(sampler)
        assert any("java" in Path(f"/proc/{pid}/comm").read_text() for pid in children), "the game runs in a Java process"
        works = rollouts(40)
        sampler.give(works)
        assert sampler.poll(5.0)
        os.kill(children[0], signal.SIGSTOP)  # one that would not notice the end of its parent
        pid, begun = sampler.pid, time.monotonic()
        os.kill(pid, signal.SIGKILL)
        (lost,), done = news_of(sampler, 1, kind=Lost)
        assert time.monotonic() - begun < 20
        ended = {news.work for news in done if isinstance(news, Done)}
        assert ended.isdisjoint(lost.works) and len(lost.works) > 0
        assert ended | set(lost.works) <= set(works) and sampler.works == ()
        assert "sampler 3 was ended by SIGKILL" in lost.words and "s.log" in lost.words
        assert not sampler.alive and sampler.exitcode == -signal.SIGKILL and sampler.poll(0.0) == []
        assert gone(pid) and all(gone(child) for child in children) and not under(sampler)


@pytest.mark.parametrize("change, words", [
    (["domains.embodied.options.nosuch=1"], "domains.embodied.environment: .*nosuch"),
    (["student.model=/nowhere/at/all"], "/nowhere/at/all"),
])
def test_a_start_that_cannot_be_is_the_error_that_it_is(config, tiny_run, tmp_path, change, words):
    broken = tiny_run.config("sampling.overlap=1", *change)
    with started(broken, tmp_path / "s.log") as sampler:
        sampler.give(rollouts(1))
        with pytest.raises(SamplerFault, match=f"sampler 0 cannot start: .*{words}"):
            wait_ready([sampler], quiet=True)
            pytest.fail(f"{sampler.poll(1.0)}")
        assert not sampler.alive and gone(sampler.pid)
        assert "Traceback" in (tmp_path / "s.log").read_text()


def test_weights_that_are_not_the_learners_end_the_run(config, place, tmp_path):
    student, other = load_model(config.student.model), load_model(f"{config.run}/teachers/game")
    place.join("sampler 0")
    place.write(named(student), 4, probe=probe_of(student))
    place.write(named(student), 5, probe=probe_of(other))
    with started(config, tmp_path / "s.log", weights=place.path(4), version=4) as sampler:
        (took,), _ = news_of(sampler, 1, kind=TookWeights)
        assert took.version == 4 and took.gap < 1e-3
        sampler.take_weights(place.path(5), 5)
        with pytest.raises(SamplerFault, match="sampler 0 has other weights than the learner: after step 5 the engine"):
            news_of(sampler, 1, kind=TookWeights)
        assert not sampler.alive


def test_it_ends_with_the_process_that_started_it(config, tmp_path):
    """One that is killed, and one that forgets to close its sampler; another is closed in order."""
    script = tmp_path / "parent.py"
    script.write_text(f"""
import sys, time
from pathlib import Path
from mopd.config import load_config
from mopd.sampling.sampler import Sampler, SamplerSpec, wait_ready

if __name__ == "__main__":
    config = load_config({str(Path(config.run) / 'tiny.yaml')!r}, ["sampling.overlap=1"])
    samplers = [Sampler(SamplerSpec(config, n, Path(sys.argv[0] + ".log"))).start() for n in range(int(sys.argv[1]))]
    wait_ready(samplers, quiet=True)
    for sampler in samplers[1:]:
        sampler.close()
    print(samplers[0].pid, samplers[0]._mark, *(s.exitcode for s in samplers[1:]), flush=True)
    if len(samplers) == 1:
        time.sleep(60)
""")
    for count, status in ((1, -signal.SIGKILL), (2, 0)):
        with subprocess.Popen([sys.executable, script, str(count)], stdout=subprocess.PIPE, text=True, cwd=REPOSITORY,
                              env=environment()) as parent:
            pid, mark, *codes = parent.stdout.readline().split()
            if count == 1:
                assert marked(MARK, mark)
                parent.kill()
            assert parent.wait(60) == status and codes == ["0"] * (count - 1)
        assert gone(int(pid))
        deadline = time.monotonic() + 10
        while marked(MARK, mark):
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_one_that_says_nothing_any_more_is_killed(sampler):
    """The last one for this sampler."""
    wait_ready([sampler], quiet=True)
    sampler.poll()
    sampler.give(rollouts(3, first=500))
    os.kill(sampler.pid, signal.SIGSTOP)
    sampler.timeout = 1.5
    (lost,), _ = news_of(sampler, 1, timeout=30, kind=Lost)
    assert "said nothing for" in lost.words and gone(sampler.pid) and not under(sampler)
