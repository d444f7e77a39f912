"""The whole main job with real environments at a tiny size: `mopd demo`, then again, then with one key changed."""

from __future__ import annotations

import json
import os
import time

import pytest

from mopd.config import load_config
from mopd.learner.moe import router_hash, weights_hash
from prefix_store import PrefixStore
from tests.tiny_run import REPOSITORY, mopd

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]
TINY = REPOSITORY / "configs" / "tiny.yaml"
DOMAINS = ("game", "science", "embodied")
NAMES = {"base", "teacher_game", "teacher_science", "teacher_embodied", "parameter_average", "student_mixed"}


def demo(run, *overrides):
    return mopd("demo", "--config", TINY, f"run={run}", *overrides, timeout=800)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a finished demo."""
    folder = tmp_path_factory.mktemp("demo") / "run"
    start = time.monotonic()
    done = demo(folder)
    assert done.returncode == 0, done.stderr
    for said in ("Environments", "Base model", "Store", "Teacher of", "MOPD²", "Baseline", "Result", "all that is left"):
        assert said in done.stderr
    assert "student_mixed" in done.stdout and "normalised" in done.stdout
    folder.with_name("wall").write_text(str(time.monotonic() - start))
    return folder


def test_results_have_the_documented_shape(run):
    results = json.loads((run / "results.json").read_text())
    assert set(results["models"]) == NAMES and set(results["normalised"]) <= NAMES
    for scores in results["models"].values():
        assert set(scores) == set(DOMAINS)
        for domain, score in scores.items():
            assert {"score", "n", "low", "high"} <= set(score)
            assert score["n"] == {"game": 6, "science": 4, "embodied": 8}[domain]
            assert 0 <= score["low"] <= score["score"] <= score["high"] <= 1
    (cost,) = results["cost"].values()
    assert set(results["cost"]) == {"student_mixed"}
    assert cost["sampled_tokens"] > 0 and cost["environment_steps"] > 0
    assert set(cost["seconds"]) == {"training", "sampling", "scoring", "environments"}
    assert all(seconds > 0 for seconds in cost["seconds"].values())
    wall = float(run.with_name("wall").read_text())
    assert 0.5 * wall < results["wall_seconds"] <= wall


def test_the_report_is_one_page_that_loads_nothing(run):
    page = (run / "report.html").read_text()
    assert "student_mixed" in page and "<svg" in page or "data:image" in page
    assert "src=\"http" not in page and "href=\"http" not in page
    for domain in DOMAINS:
        assert domain in page
    assert any(json.loads((run / "students" / "student_mixed" / "seed-1" / "episodes.json").read_text()))


def test_every_domain_learns_from_every_stream(run):
    lines = [json.loads(line) for line in
             (run / "students" / "student_mixed" / "seed-1" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2]
    for line in lines:
        for domain in DOMAINS:
            numbers = line["domains"][domain]
            assert set(numbers["streams"]) == {"rollout", "teacher_prefix", "sft_prefix"}
            assert all(stream["tokens"] > 0 for stream in numbers["streams"].values())
            assert numbers["tokens"] == sum(stream["tokens"] for stream in numbers["streams"].values())
            assert numbers["mismatch_max"] < 1e-3 and numbers["infra_failures"] == {}
        assert line["router"]["cv"] and sum(line["omega"].values()) == pytest.approx(1)


def test_the_router_is_the_base_models_everywhere_and_nothing_else_is(run):
    transformers = pytest.importorskip("transformers")
    folders = [run / "base", *(run / "teachers" / d for d in DOMAINS), run / "students/student_mixed/seed-1/model"]
    models = [transformers.AutoModelForCausalLM.from_pretrained(folder) for folder in folders]
    assert len({router_hash(model) for model in models}) == 1
    assert len({weights_hash(model) for model in models}) == len(models)
    manifest = json.loads((folders[-1] / "manifest.json").read_text())
    assert manifest["router_hash"] == router_hash(models[0]) and manifest["steps"] == 3
    tokenizer = transformers.AutoTokenizer.from_pretrained(folders[-1])
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "go"}], add_generation_prompt=True,
                                           return_tensors="pt", return_dict=True)
    written = models[-1].generate(**prompt, max_new_tokens=3, do_sample=False)
    assert written.shape[1] > prompt["input_ids"].shape[1]
    assert not any(path.suffix in (".bin", ".pt", ".pkl") for path in folders[-1].iterdir())


def test_the_store_holds_whole_sequences_of_experts_and_teachers(run):
    with PrefixStore.open(run / "store") as store:
        assert not store.verify().problems
        domains = store.info()["domains"]
        assert set(domains) == set(DOMAINS)
        config = load_config(TINY, [f"run={run}"])
        for name, sources in domains.items():
            assert sources["teacher"]["sequences"] == config.domains[name].teacher_episodes
            assert sources["expert"]["sequences"] == sources["expert"]["successes"] > 0
        assert len(store.fingerprints()) <= 4 and len({f.tokenizer for f in store.fingerprints()}) == 1


def test_a_second_run_reuses_everything(run):
    before, results = written(run), json.loads((run / "results.json").read_text())
    done = demo(run)
    assert done.returncode == 0, done.stderr
    assert "17 of 17 stages are already there and are reused." in done.stderr and "[1/" not in done.stderr
    after = written(run)
    assert {p for p in before if before[p] != after.get(p)} <= {"results.json", "report.html", "timings.json"}
    assert json.loads((run / "results.json").read_text()) == results


def test_a_changed_key_reruns_what_depends_on_it(run):
    before = written(run)
    done = demo(run, "train.steps=2", "train.optimizer.learning_rate=2e-3")
    assert done.returncode == 0, done.stderr
    assert "14 of 17 stages are already there and are reused." in done.stderr
    after = written(run)
    changed = {path for path in after if before.get(path) != after[path] and not path.startswith("jobs")}
    assert all(path.startswith(("students/student_mixed/", "eval/student_mixed@1.")) or
               path in ("results.json", "report.html", "timings.json") for path in changed), changed
    assert len((run / "students/student_mixed/seed-1/metrics.jsonl").read_text().splitlines()) == 2
    assert json.loads((run / "results.json").read_text())["cost"]["student_mixed"]["optimizer_steps"] == 2


def written(run) -> dict[str, int]:
    """When each file was written."""
    return {os.path.relpath(os.path.join(root, name), run): os.stat(os.path.join(root, name)).st_mtime_ns
            for root, _, names in os.walk(run) for name in names}
