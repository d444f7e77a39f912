"""Results, table and page from run folders as a run leaves them, whole and with parts missing."""

import html.parser
import io
import json
import math
import re

import numpy as np
import pytest
from rich.console import Console

from mopd.metrics import MetricsLog
from mopd.report import build_results, format_count, format_seconds, markdown_table, print_results, write_report
from mopd.report_plots import smooth

DOMAINS = {"game": 300, "science": 84, "embodied": 300}
SKILL = {"base": (0.15, 0.10, 0.25), "teacher_game": (0.83, 0.05, 0.20), "teacher_science": (0.08, 0.72, 0.22),
         "teacher_embodied": (0.10, 0.06, 0.78), "parameter_average": (0.30, 0.15, 0.35),
         "student_mixed@1": (0.74, 0.58, 0.72), "student_mixed@2": (0.70, 0.62, 0.69)}
STUDY = {"student_rollout@1": (0.66, 0.5, 0.65), "student_rollout@2": (0.62, 0.48, 0.7),
         "student_prefix@1": (0.68, 0.52, 0.66), "off_policy_sft@1": (0.6, 0.35, 0.6)}
STREAMS = ("rollout", "teacher_prefix", "sft_prefix")


def make_run(folder, *, skill=SKILL, steps=120, scale=1.0, episodes=6):
    """A run folder in the layout that the stages write, with plausible numbers."""
    rng = np.random.default_rng(0)
    (folder / "eval").mkdir(parents=True)
    hardness = {d: rng.random(max(4, int(n * scale))) for d, n in DOMAINS.items()}
    for model, shares in skill.items():
        domains = {}
        for (domain, hard), share in zip(hardness.items(), shares, strict=True):
            chance = np.clip(share + 0.5 * (0.5 - hard), 0, 1)
            success = rng.random(hard.size) < chance
            listed = [{"task": f"task:{i}", "score": float(s or rng.random() * 0.4), "success": bool(s),
                       "turns": int(rng.integers(2, 9)), "failure": ""} for i, s in enumerate(success)]
            domains[domain] = {"score": float(success.mean()), "n": int(hard.size), "low": 0.0, "high": 1.0,
                               "episodes": listed}
        whole = {"model": model, "split": "test", "domains": domains}
        (folder / "eval" / f"{model}.json").write_text(json.dumps(whole))
    for name, seed in (m.split("@") for m in skill if "@" in m):
        with MetricsLog(folder / "students" / name / f"seed-{seed}" / "metrics.jsonl") as writer:
            for step in range(1, steps + 1):
                writer.write(_record(rng, step, steps))
    (folder / "episodes.json").write_text(json.dumps([_episode(rng, i) for i in range(episodes)]))
    (folder / "timings.json").write_text(json.dumps(
        {"stages": {"environments": 31.5, "base": 240.0, "teachers": 260.0, "store": 90.0, "students": 820.0,
                    "evaluation": 160.0}, "wall_seconds": 1601.5}))
    return folder


def _record(rng, step, steps):
    done = step / steps
    domains = {}
    for i, domain in enumerate(DOMAINS):
        kl = (0.9 + 0.4 * i) * math.exp(-(3.5 - i) * done) + 0.05 + 0.08 * rng.random()
        turns = rng.geometric(0.2 + 0.05 * i, size=40)
        domains[domain] = {
            "share": (0.33, 0.33 + 0.2 * done, 0.34 - 0.2 * done)[i], "reverse_kl": kl, "reverse_kl_k3": kl * 1.1,
            "forward_kl": kl * 1.3, "tokens": 500, "entropy_student": 0.4, "entropy_teacher": 0.3,
            "teacher_agreement": 0.6 + 0.3 * done, "masked_share": 0.0, "reward": None if step % 2 else 0.5,
            "success": 0.2 + 0.5 * done, "turns": 4.0, "staleness": 0.0,
            "infra_failures": {"environment_crashed": 1} if step == 3 and domain == "science" else {},
            "depth": {str(d): int(n) for d, n in zip(*np.unique(turns - 1, return_counts=True), strict=True)},
            "streams": {s: {"tokens": n, "sequences": 5, "reverse_kl": kl}
                        for s, n in zip(STREAMS, (200, 180, 120), strict=True)}}
    layers = np.arange(4)
    router = {"cv": 0.7 + 0.03 * layers + 0.05 * rng.random(4), "peak": 2.4 + 0.2 * layers + 0.3 * rng.random(4),
              "cold": 0.02 * layers * rng.random(4), "alerts": ["layer 3: peak 3.4 > 3.2"] if step == 7 else []}
    return {"step": step, "loss": 1 - 0.5 * done, "gradient_norm": 1.0, "learning_rate": 1e-3,
            "seconds": {"training": 1.5, "sampling": 2.0, "scoring": 0.5, "environments": 0.75, "total": 5.0},
            "tokens": {"sampled": 900, "trained": 1500, "computed": 9000}, "environment_steps": 60, "domains": domains,
            "router": router}


def _episode(rng, i):
    segments = [{"kind": "prompt", "text": "<|im_start|>system\nOne action a turn.<|im_end|>"}]
    for _ in range(4):
        segments.append({"kind": "observation", "text": "You are in the <kitchen>. You see a fridge & a door."})
        words = ["open", " fri", "dge", " now", "<|im_end|>", "\n"]
        scores = -np.sort(rng.exponential(1.2, len(words)))
        segments.append({"kind": "action", "text": "".join(words), "tokens": [
            {"text": w, "teacher_logprob": float(t), "student_logprob": float(t / 2)}
            for w, t in zip(words, scores, strict=True)]})
    return {"domain": list(DOMAINS)[i % 3], "task": f"coin:{i}", "success": i % 2 == 0, "model": "student_mixed",
            "segments": segments}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("runs") / "demo")


def shares(run, model, domain):
    listed = json.loads((run / "eval" / f"{model}.json").read_text())["domains"][domain]["episodes"]
    return np.array([e["success"] for e in listed], float)


def test_results_have_the_promised_numbers(run):
    results = build_results(run)
    assert list(results["models"]) == ["base", "teacher_game", "teacher_science", "teacher_embodied",
                                       "parameter_average", "student_mixed"]
    assert results["notes"] == [] and results["wall_seconds"] == 1601.5
    normalised = []
    for domain, n in DOMAINS.items():
        base, teacher = shares(run, "base", domain).mean(), shares(run, f"teacher_{domain}", domain).mean()
        student = (shares(run, "student_mixed@1", domain).mean() + shares(run, "student_mixed@2", domain).mean()) / 2
        got = results["models"]["student_mixed"][domain]
        assert got["score"] == pytest.approx(student) and got["n"] == n
        assert got["low"] < student < got["high"]
        normalised.append((student - base) / (teacher - base))
    assert results["normalised"]["student_mixed"] == pytest.approx(np.mean(normalised))
    low, high = results["normalised_interval"]["student_mixed"]
    assert low < results["normalised"]["student_mixed"] < high and high - low < 0.4
    assert results["normalised"]["base"] == 0
    by_seed = [s["normalised"] for s in results["seeds"]["student_mixed"].values()]
    assert list(results["seeds"]["student_mixed"]) == ["1", "2"]
    assert np.mean(by_seed) == pytest.approx(results["normalised"]["student_mixed"])
    above = results["above_parameter_average"]["student_mixed"]
    assert above["difference"] == pytest.approx(
        results["normalised"]["student_mixed"] - results["normalised"]["parameter_average"])
    assert 0 < above["low"] < above["difference"] < above["high"]


def test_cost_is_the_mean_over_training_seeds(run):
    cost = build_results(run)["cost"]["student_mixed"]
    assert cost["sampled_tokens"] == 120 * 900 and cost["environment_steps"] == 120 * 60
    assert cost["optimizer_steps"] == 120 and cost["training_seeds"] == 2
    assert cost["seconds"] == {"training": 180.0, "sampling": 240.0, "scoring": 60.0, "environments": 90.0}
    assert cost["total_seconds"] == 600.0
    assert cost["streams"] == {"rollout": 72000, "sft_prefix": 43200, "teacher_prefix": 64800}


def test_infrastructure_failures_leave_the_scores_and_are_counted(tmp_path):
    run = make_run(tmp_path / "r", steps=2)
    path = run / "eval" / "student_mixed@1.json"
    data = json.loads(path.read_text())
    for episode in data["domains"]["game"]["episodes"][:30]:
        episode.update(success=False, failure="environment_crashed")
    path.write_text(json.dumps(data))
    results = build_results(run)
    got = results["models"]["student_mixed"]["game"]
    one, two = shares(run, "student_mixed@1", "game")[30:].mean(), shares(run, "student_mixed@2", "game").mean()
    assert got["score"] == pytest.approx((one + two) / 2) and got["n"] == 270
    assert got["infra_failures"] == {"environment_crashed": 30}
    assert any("30 of 300 episodes" in n for n in results["notes"])
    assert any("student_mixed, game: 270 of 300 tasks" in n for n in results["notes"])


def test_models_are_paired_by_task_and_not_by_place(tmp_path):
    run = make_run(tmp_path / "r", steps=2)
    before = build_results(run)
    path = run / "eval" / "base.json"
    data = json.loads(path.read_text())
    for part in data["domains"].values():
        part["episodes"].reverse()
    path.write_text(json.dumps(data))
    after = build_results(run)
    assert after["normalised_interval"] == before["normalised_interval"]


def test_one_file_for_each_domain_is_the_same(tmp_path):
    run = make_run(tmp_path / "r", steps=2, scale=0.2)
    before = build_results(run)
    for path in (run / "eval").iterdir():
        data = json.loads(path.read_text())
        for domain, part in data["domains"].items():
            one = {"model": data["model"], "domain": domain, "split": "test", **part}
            (run / "eval" / f"{data['model']}.{domain}.json").write_text(json.dumps(one))
        path.unlink()
    after = build_results(run)
    assert sorted(after["domains"]) == sorted(before["domains"])
    assert all(after[k] == before[k] for k in ("models", "cost", "notes"))
    assert after["normalised"] == pytest.approx(before["normalised"])
    for model, interval in before["normalised_interval"].items():
        assert after["normalised_interval"][model] == pytest.approx(interval)


def test_students_trained_elsewhere_count_where_they_were_evaluated(tmp_path):
    run = make_run(tmp_path / "r", steps=2, scale=0.2, skill={**SKILL, **STUDY})
    study = run / "study"
    (run / "eval").rename(tmp_path / "eval")
    study.mkdir()
    (tmp_path / "eval").rename(study / "eval")
    (study / "eval" / "student_mixed@2.json").unlink()
    (study / "eval" / "off_policy_sft@1.json").unlink()
    (run / "episodes.json").rename(run / "students" / "student_rollout" / "seed-1" / "episodes.json")
    page = write_report(study, students=run / "students").read_text()
    results = json.loads((study / "results.json").read_text())
    assert list(results["cost"]) == ["student_mixed", "student_rollout", "student_prefix"]
    assert results["cost"]["student_mixed"]["training_seeds"] == 1
    assert any("off_policy_sft seed-1, student_mixed seed-2" in n for n in results["notes"])
    assert "You are in the &lt;kitchen&gt;" in page


def test_a_teacher_not_above_the_base_is_said(tmp_path):
    weak = {**SKILL, "teacher_science": (0.1, 0.0, 0.2), "base": (0.1, 0.5, 0.1)}
    run = make_run(tmp_path / "r", steps=2, skill=weak)
    results = build_results(run)
    assert results["normalised"]["student_mixed"] is None
    assert results["normalised_by_domain"]["student_mixed"]["game"]["value"] > 0
    assert any(n.startswith("Normalised scores: science") for n in results["notes"])
    json.dumps(results, allow_nan=False)
    write_report(run)


@pytest.mark.parametrize("gone", ["eval", "eval/base.json", "eval/teacher_game.json", "students", "episodes.json",
                                  "timings.json", "everything"])
def test_missing_parts_are_said_and_nothing_crashes(tmp_path, gone):
    run = make_run(tmp_path / "r", steps=3, scale=0.05, episodes=1)
    for path in sorted(run.rglob("*"), reverse=True):
        where = path.relative_to(run).as_posix()
        if gone == "everything" or where == gone or where.startswith(gone + "/"):
            path.rmdir() if path.is_dir() else path.unlink()
    page = write_report(run).read_text()
    results = json.loads((run / "results.json").read_text())
    expected = {"everything": "eval/: no evaluation is there", "eval/base.json": "no evaluation of base",
                "eval/teacher_game.json": "not there: teacher_game"}.get(gone, gone)
    assert expected in " ".join(results["notes"])
    assert "What is missing" in page
    out = io.StringIO()
    print_results(results, Console(file=out, width=120))
    assert "note: " in out.getvalue()


def test_broken_files_are_said_and_nothing_crashes(tmp_path):
    run = make_run(tmp_path / "r", steps=3, scale=0.05, episodes=1)
    (run / "eval" / "base.json").write_text('{"model": "ba')
    (run / "eval" / "teacher_game.json").write_text('{"domains": {"game": {"episodes": [{}]}}}')
    (run / "students" / "student_mixed" / "seed-1" / "metrics.jsonl").write_text("no json\n")
    (run / "episodes.json").write_text('{"domain": 1}')
    page = write_report(run).read_text()
    for words in ("eval/base.json is not readable", "eval/teacher_game.json: not an evaluation",
                  "students/student_mixed/seed-1/metrics.jsonl", "episodes.json: not a list"):
        assert words in page
    assert json.loads((run / "results.json").read_text())["cost"]["student_mixed"]["training_seeds"] == 1


def test_sparse_metrics_still_make_a_page(tmp_path):
    """Supervised training reports neither sampling nor a teacher."""
    run = make_run(tmp_path / "r", steps=2, scale=0.05, skill={**SKILL, **STUDY})
    with MetricsLog(run / "students" / "off_policy_sft" / "seed-1" / "metrics.jsonl") as writer:
        for step in range(3):
            writer.write({"step": step, "loss": 1.0, "seconds": {"training": 2.0}, "tokens": {"trained": 10}})
    page = write_report(run).read_text()
    assert "off_policy_sft reports no reverse KL by domain" in page
    cost = json.loads((run / "results.json").read_text())["cost"]["off_policy_sft"]
    assert cost["sampled_tokens"] == 0 and cost["total_seconds"] == 6.0 and cost["optimizer_steps"] == 3


class Checker(html.parser.HTMLParser):
    """Collects tags, ids and addresses, and whether every opened element is closed in order."""

    void = {"meta", "link", "br", "img", "input", "hr"}

    def __init__(self):
        super().__init__()
        self.open, self.ids, self.addresses, self.errors, self.tags = [], [], [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.ids += [v for k, v in attrs if k == "id"]
        self.addresses += [v for k, v in attrs if k in ("src", "href", "xlink:href")]
        if tag not in self.void:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in self.void:
            self.open.pop()

    def handle_endtag(self, tag):
        if not self.open or self.open.pop() != tag:
            self.errors.append(tag)


def test_page_is_one_sound_file_without_outside_addresses(tmp_path):
    run = make_run(tmp_path / "r", skill={**SKILL, **STUDY}, steps=150, scale=0.2)
    page = write_report(run)
    text = page.read_text()
    assert page.stat().st_size < 3_000_000
    assert not list(run.glob("*.part"))
    checker = Checker()
    checker.feed(text)
    assert checker.errors == [] and checker.open == []
    assert len(set(checker.ids)) == len(checker.ids)
    assert all(a.startswith(("#", "data:")) for a in checker.addresses)
    assert set(re.findall(r'url\(#([^)]+)\)', text)) <= set(checker.ids)
    assert checker.tags.count("svg") == 3 + 5 * 4
    assert not re.search(r"#0[abcd]01[0-9a-f]{2}\b", text), "a placeholder colour was left in a plot"
    used = set(re.findall(r"var\((--\w+)\)", text))
    assert all(text.count(f"{v}:") == 2 for v in used), "each colour needs a value for light and one for dark"
    assert write_report(run).read_text() == text


def test_a_run_that_sampled_ahead_shows_who_waited_and_how_old_its_tokens_were(tmp_path):
    folder = make_run(tmp_path / "run", steps=4)
    assert "Age of the tokens" not in (write_report(folder), (folder / "report.html").read_text())[1]
    path = folder / "students" / "student_mixed" / "seed-1" / "metrics.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    for record in records:
        record["seconds"] |= {"idle": 0.2, "total": 1.0}
        record["sampling"] = {"busy_share": 0.7, "staleness_mean": 1.0, "staleness_max": 2, "dropped": {"stale": 1}}
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    write_report(folder)
    page = (folder / "report.html").read_text()
    assert "Age of the tokens" in page and f"groups dropped: {len(records)} stale" in page
    assert "Training and sampling beside each other" in page


def test_foreign_text_is_escaped(tmp_path):
    run = make_run(tmp_path / "r", steps=2, scale=0.05)
    bad = '<script>alert("1")</script><img src=x>'
    (run / "episodes.json").write_text(json.dumps([
        {"domain": bad, "task": bad, "success": True, "model": bad, "segments": [
            {"kind": "prompt", "text": bad}, {"kind": "observation", "text": bad},
            {"kind": "action", "text": bad,
             "tokens": [{"text": bad, "teacher_logprob": None, "student_logprob": -1.0}]},
            {"kind": "action", "text": bad, "tokens": []}]}]))
    data = json.loads((run / "eval" / "base.json").read_text())
    data["domains"][bad] = data["domains"]["game"]
    (run / "eval" / "base.json").write_text(json.dumps(data))
    text = write_report(run).read_text()
    assert text.count("<script") == 1 and "<img" not in text
    assert "&lt;script&gt;alert(" in text


def test_tokens_carry_their_class_and_both_numbers(tmp_path):
    run = make_run(tmp_path / "r", steps=2, scale=0.05)
    tokens = [{"text": f"w{i}", "teacher_logprob": x, "student_logprob": -0.5}
              for i, x in enumerate([0.0, -0.5, -1.0, -2.0, -9.0])]
    (run / "episodes.json").write_text(json.dumps([{"domain": "game", "task": "coin:1", "success": True, "model": "m",
                                                    "segments": [{"kind": "action", "text": "", "tokens": tokens}]}]))
    text = write_report(run).read_text()
    found = re.findall(r'<i class=t(\d) title="([^"]*)">(w\d)</i>', text)
    assert [(int(c), w) for c, _, w in found] == [(i, f"w{i}") for i in range(5)]
    assert found[2][1] == "teacher -1.00 (36.8%) · student -0.50 (60.7%)"


def test_a_flood_of_episodes_is_cut_with_a_word_and_no_domain_is_lost(tmp_path):
    run = make_run(tmp_path / "r", steps=2, scale=0.05)
    token = {"text": "x", "teacher_logprob": -1.0, "student_logprob": -1.0}
    (run / "episodes.json").write_text(json.dumps([
        {"domain": d, "task": f"{d}:{i}", "success": False, "model": "m",
         "segments": [{"kind": "action", "text": "x", "tokens": [token] * 1500}]} for d in DOMAINS for i in range(10)]))
    page = write_report(run)
    assert page.stat().st_size < 3_000_000
    assert re.search(r"\d+ further episodes are left out", page.read_text())
    assert all(f"{d}:0" in page.read_text() for d in DOMAINS)


@pytest.mark.parametrize("width", [80, 140])
def test_terminal_table(run, width):
    out = io.StringIO()
    results = build_results(run)
    print_results(results, Console(file=out, width=width))
    text = out.getvalue()
    assert all(len(line) <= width for line in text.splitlines())
    row = next(line for line in text.splitlines() if "teacher_game" in line)
    assert "◆" in row and row.count("±") == 3
    low, high = results["normalised_interval"]["student_mixed"]
    assert f"{results['normalised']['student_mixed']:.2f} [{low:.2f}, {high:.2f}]" in re.sub(r"\s+", " ", text)
    assert "108.0k" in text and "7.2k" in text and "600" in text


def test_markdown_table(run):
    lines = markdown_table(build_results(run)).splitlines()
    assert len({line.count("|") for line in lines if line.startswith("|")}) == 1
    assert lines[0].startswith("| model | game | science | embodied | normalised |")
    assert "◆" in next(line for line in lines if "teacher_science" in line)


def test_no_run_folder_is_one_clear_error(tmp_path):
    with pytest.raises(FileNotFoundError, match="no run folder"):
        write_report(tmp_path / "nowhere")


def test_small_formats():
    assert [format_count(x) for x in (None, 0, 999, 1500, 2_400_000)] == ["—", "0", "999", "1.5k", "2.4M"]
    assert [format_seconds(x) for x in (None, 5, 75, 3700)] == ["—", "5 s", "1 min 15 s", "1 h 01 min"]


def test_smoothing_by_hand():
    values = np.array([1.0, 2.0, math.nan, 6.0, 8.0])
    assert smooth(values, 3) == pytest.approx([1.5, 1.5, 4.0, 7.0, 7.0])
    assert np.isnan(smooth(np.array([math.nan, math.nan, math.nan, 1.0]), 3)).tolist() == [True, True, False, False]
