"""Scores find their points, survive files and states bit by bit, and say what does not fit."""

import dataclasses
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefix_store import PrefixStore
from prefix_store.extras import Extra
from prefix_store.scores import (
    Scores,
    ScoresError,
    SuppliedScores,
    find_rows,
    read_scores,
    rows_of,
    stored_scores,
    write_scores,
)
from prefix_store.selection import SelectionOptions, Selector
from prefix_store.trajectory import example_sequence


def with_metadata(seed):
    seq = example_sequence(seed)
    per_turn = [0.25 * turn for turn in range(seq.turns)]
    # the reader's doubt at every token of every action, and nothing elsewhere
    extra = {}
    if seed % 4:
        for number, context in enumerate(seq.contexts):
            played = np.zeros(len(context.tokens), dtype=bool)
            for s in context.actions():
                played[s.start:s.end] = True
            extra[number] = {"doubt": Extra.per_token(context.tokens[played].astype(np.float32), played)}
        seq = dataclasses.replace(seq, contexts=tuple(dataclasses.replace(c, extras=extra[n])
                                                      for n, c in enumerate(seq.contexts)))
    metadata = {"judge": seed / 10, "per_turn": per_turn, "words": "none"} if seed % 3 else {}
    return dataclasses.replace(seq, outcome=dataclasses.replace(seq.outcome, metadata=metadata), metadata={"rank": seed})


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    path = tmp_path_factory.mktemp("scores") / "store"
    with PrefixStore.open(path, "w") as writer:
        for seed in range(40):
            writer.append(with_metadata(seed))
        writer.commit()
    return PrefixStore.open(path)


@pytest.fixture(scope="module")
def index(store):
    return store.index()


def test_rows_are_found_by_sequence_and_turn(index):
    rows = np.random.default_rng(0).permutation(len(index))
    points = [index.point(int(row)) for row in rows]
    assert np.array_equal(rows_of(index, points), rows)
    first = points[0]
    asked = [(first.sequence, first.turn), ("00" * 32, 0), (first.sequence, 999), (first.sequence, -1), ("not an id", 0),
             (first.sequence.upper(), first.turn), ("ff" * 32, 0), (first.sequence[:-2], 0)]  # fmt: skip
    found = find_rows(index, [s for s, _ in asked], [t for _, t in asked])
    assert found.tolist() == [rows[0], -1, -1, -1, -1, rows[0], -1, -1]
    assert find_rows(index, [], []).tolist() == [] and rows_of(index, []).tolist() == []
    last = index.point(len(index) - 1)
    assert find_rows(index, [last.sequence], [last.turn + 1]).tolist() == [-1]


steps = st.lists(st.lists(st.tuples(st.integers(0, 60), st.floats(-5, 5, width=32) | st.just(float("nan"))), max_size=9),
                 max_size=6)  # fmt: skip


@given(steps=steps, smoothing=st.sampled_from([0.0, 0.5, 0.9]))
@settings(max_examples=40, deadline=None)
def test_the_table_is_what_was_measured_and_its_state_is_all_of_it(index, steps, smoothing):
    table, plain, when = Scores(index, smoothing), {}, {}
    table.supply("reverse_kl", np.array([2, 100]), np.array([0.5, 0.75]))
    plain |= {2: np.float32(0.5), 100: np.float32(0.75)}
    for step, measured in enumerate(steps):
        values = dict(measured)
        rows = np.array(sorted(values), dtype=np.int64)
        table.record(step, rows, {"reverse_kl": np.array([values[r] for r in rows.tolist()]), "k1": np.ones(len(rows))})
        for row, value in values.items():
            when[row] = step
            if not np.isnan(value):
                old = plain.get(row)
                new = value if old is None or not smoothing else smoothing * float(old) + (1 - smoothing) * value
                plain[row] = np.float32(new)
    every = np.arange(len(index))
    expected = np.full(len(index), np.nan)
    expected[list(plain)] = list(plain.values())
    np.testing.assert_array_equal(table.of("reverse_kl", every), expected)
    assert table.touched().tolist() == sorted(when)
    assert table.steps(table.touched()).tolist() == [when[r] for r in sorted(when)]
    again = Scores(index, smoothing)
    again.supply("reverse_kl", np.array([2, 100]), np.array([0.5, 0.75]))
    again.load_state_dict(json.loads(json.dumps(table.state_dict())))
    for name in ("reverse_kl", "k1"):
        np.testing.assert_array_equal(again.of(name, every), table.of(name, every))
    assert again.state_dict() == table.state_dict()


def test_a_state_of_few_points_is_small(index):
    table = Scores(index)
    assert len(json.dumps(table.state_dict())) < 60
    table.record(3, np.array([7, 9]), {"reverse_kl": np.array([0.1, 0.2])})
    assert len(json.dumps(table.state_dict())) < 200


@pytest.mark.parametrize("suffix", [".json", ".parquet"])
def test_what_was_measured_can_be_supplied_again(store, index, tmp_path, suffix):
    if suffix == ".parquet":
        pytest.importorskip("pyarrow")
    table = Scores(index)
    rows = np.array([3, 50, 51, 90])
    table.record(5, rows, {"reverse_kl": np.array([0.1, 2.0, np.nan, 1e-9]), "disagreement": np.array([0, 1, 0.5, 0.25])})
    assert write_scores(tmp_path / f"scores{suffix}", table) == 4
    found = read_scores(tmp_path / f"scores{suffix}")
    assert found.digest == read_scores(tmp_path / f"scores{suffix}").digest and set(found.columns) == {"reverse_kl",
                                                                                                        "disagreement"}
    selector = Selector(store, SelectionOptions("weighted", {"score": "disagreement"}), supplied=found)
    assert selector.supplied == {"points": 4, "unknown": 0, "not_finite": 1}
    every = np.arange(len(index))
    for name in ("reverse_kl", "disagreement"):
        np.testing.assert_array_equal(selector.scores.of(name, every), table.of(name, every))
    assert not len(selector.scores.touched()) and selector.scores.state_dict()["points"] == 0


def test_scores_of_other_programs(store, index, tmp_path):
    points = [index.point(5), index.point(60)]
    records = [{"sequence": p.sequence, "turn": p.turn, "score": i + 0.5, "context": p.context} for i, p in enumerate(points)]
    records.append({"sequence": "ab" * 32, "turn": 0, "score": 9.0})
    records.append({"sequence": points[0].sequence, "turn": 0, "score": None})
    (tmp_path / "a.json").write_text(json.dumps(records))
    (tmp_path / "b.jsonl").write_text("\n".join(json.dumps(r) for r in records) + "\n\n")
    (tmp_path / "c.json").write_text(json.dumps({k: [r.get(k) for r in records] for k in ("sequence", "turn", "score")}))
    digests = set()
    for name in ("a.json", "b.jsonl", "c.json"):
        found = read_scores(tmp_path / name)
        digests.add(found.digest)
        table = Scores(index)
        assert found.put_into(table) == {"points": 3, "unknown": 1, "not_finite": 1}
        assert table.of("score", np.array([5, 60, 61])).tolist()[:2] == [0.5, 1.5]
    assert len(digests) == 1
    changed = SuppliedScores(found.sequence, found.turn, {"score": found.columns["score"] + 1})
    assert changed.digest not in digests


@pytest.mark.parametrize("name, text, message", [
    ("a.json", "[", "a.json: not valid JSON"), ("a.txt", "", "read from .json, .jsonl or .parquet"),
    ("a.json", '[{"sequence": "x", "score": 1}]', "record 1 has no turn"), ("a.json", '"x"', "expected records"),
    ("a.json", '{"sequence": ["x"], "turn": [0]}', "no score beside sequence and turn"),
    ("a.json", '{"turn": [0]}', "no column 'sequence'; there is turn"),
    ("a.json", '{"sequence": ["x"], "turn": [0], "score": ["high"]}', "a.json: "),
    ("a.json", '{"sequence": ["x", "y"], "turn": [0, 1], "score": [1]}', "2 sequences and 1 values of 'score'"),
    ("a.json", '{"sequence": ["x"], "turn": [1.5], "score": [1]}', "a turn is no whole number"),
    ("a.json", '{"sequence": ["x"], "turn": [[1]], "score": [1]}', "'turn' has 2 dimensions"),
    ("a.json", '{"sequence": ["x"], "turn": [0], "score": [[1, 2]]}', "'score' has 2 dimensions"),
    ("a.json", '{"sequence": ["x"], "turn": [0], "score": [1%s]}' % ("0" * 400), "too large"),
    ("a.json", '{"sequence": [5], "turn": [0], "score": [1]}', "5 is no sequence id"),
    ("a.json", r'{"sequence": ["\ud800"], "turn": [0], "score": [1]}', "is no sequence id"),
    ("a.json", "[" * 100_000, "a.json: not valid JSON"),
])  # fmt: skip
def test_files_that_are_no_scores(tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    with pytest.raises(ScoresError, match=message):
        read_scores(tmp_path / name)


def test_numbers_that_a_table_cannot_hold_are_counted(index, tmp_path):
    """A turn beyond every trajectory is unknown; a score beyond float32 would make every weight NaN."""
    point = index.point(0)
    records = [{"sequence": point.sequence, "turn": point.turn, "score": 1e300},
               {"sequence": point.sequence, "turn": 10**30, "score": 1.0}]
    (tmp_path / "a.json").write_text(json.dumps(records))
    supplied = read_scores(tmp_path / "a.json")
    selector = Selector(index, SelectionOptions("weighted", {"score": "score"}), supplied=supplied)
    assert selector.supplied == {"points": 1, "unknown": 1, "not_finite": 1}
    selector = Selector(index, SelectionOptions("weighted"))
    assert selector.observe(0, {point: 1e300}) == {"points": 1, "not_finite": 1}
    assert np.isnan(selector.scores.of("reverse_kl", np.array([0]))).all()


def test_stored_numbers_are_scores(store, index):
    every = np.arange(len(index))
    sequences = {seq_id: store.sequence(seq_id) for seq_id in store.ids()}

    def table(name):
        scores = Scores(index)
        scores.supply(name, *stored_scores(store, name))
        return scores.of(name, every)

    of_row = [sequences[index.sequence_id(int(i))] for i in index.sequence]
    expected = {"outcome.reward": [s.outcome.reward for s in of_row],
                "outcome.true_reward": [s.outcome.true_reward for s in of_row],
                "outcome.metadata.judge": [s.outcome.metadata.get("judge", np.nan) for s in of_row],
                "outcome.metadata.per_turn": [s.outcome.metadata["per_turn"][t] if s.outcome.metadata else np.nan
                                              for s, t in zip(of_row, index.turn, strict=True)],
                "extra.doubt": [store.continuation(index.point(i)).astype(float).mean() if s.contexts[0].extras else np.nan
                                for i, s in enumerate(of_row)],
                "metadata.rank": [s.metadata["rank"] for s in of_row]}  # fmt: skip
    for name, values in expected.items():
        np.testing.assert_array_equal(table(name), np.array(values, dtype=np.float32))
        selector = Selector(store, SelectionOptions("weighted", {"score": name}))
        selector.require_scores([])
        assert not selector.wants_scores, "a run would measure what it does not draw by"
    success = Selector(store, SelectionOptions("weighted", {"score": "outcome.success", "floor": 0.0, "remeasure": 0.0}))
    assert all(sequences[p.sequence].outcome.success for p in success.select(0, "game", "sft_prefix", 40))
    for name, message in (("outcome.metadata.words", "words is 'none'; it must be a number, or a list with one for each"),
                          ("outcome.metadata.absent", "no trajectory of this version has a outcome.metadata.absent"),
                          ("extra.absent", "no trajectory of this version has an extra 'absent'"),
                          ("outcome.luck", "no stored score 'outcome.luck'; there is outcome.reward")):
        with pytest.raises(ScoresError, match=message):
            stored_scores(store, name)
    with pytest.raises(ScoresError, match="give the store itself"):
        Selector(index, SelectionOptions("weighted", {"score": "outcome.reward"}))


def test_supplied_scores_belong_to_a_run(store, index):
    def selector(value):
        turn, column = index.turn[4:5].astype(np.int64), np.array([value])
        scores = SuppliedScores((index.point(4).sequence,), turn, {"reverse_kl": column})
        return Selector(store, SelectionOptions("weighted"), 1, supplied=scores)

    state = selector(1.0).state_dict()
    selector(1.0).load_state_dict(state)
    with pytest.raises(ValueError, match="saved with other supplied scores"):
        selector(2.0).load_state_dict(state)
    with pytest.raises(ValueError, match="score_smoothing is 1"):
        Scores(index, 1.0)
