"""Every pair of ways to configure the learner trains as one plain process does, on two real processes over gloo.

`scripts/config_matrix.py --strength 3` runs every three.
"""

from __future__ import annotations

import itertools

import pytest

from mopd.learner.engine import LearnerConfig
from tests.mopd.learner.configurations import (
    FACTORS,
    TOLERANCE,
    Row,
    differences,
    every,
    on_ranks,
    possible,
    reference_of,
    results_of_two,
    spread_rows,
    tell,
    trained,
)

pytestmark = pytest.mark.timeout(900)
ROWS = list(dict.fromkeys([*spread_rows(), *every(2)]))


def ranks_main() -> None:
    tell(on_ranks(ROWS))


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """All rows, in one pair of processes."""
    return results_of_two("tests.mopd.learner.test_configurations", ROWS, tmp_path_factory.mktemp("two"), timeout=800)


@pytest.fixture(scope="module")
def one():
    """The plain configurations on this process; made once each."""
    made: dict[Row, dict] = {}
    return lambda row: made.get(reference_of(row)) or made.setdefault(reference_of(row), trained(reference_of(row)))


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_two_processes_train_as_one(row, one, two):
    mine, theirs = one(row), two[row]
    assert "error" not in theirs, theirs
    assert theirs["tokens"] == mine["tokens"]
    loss, norm, change = differences(mine, theirs)
    assert (loss, norm) <= TOLERANCE[row.dtype] and norm <= TOLERANCE[row.dtype][1]
    assert change < (1e-4 if row.dtype == "float32" else 0.02), "the weights moved otherwise"
    if row.dtype == "float32":
        assert theirs["counts"] == mine["counts"]


def test_the_rows_have_every_pair_that_can_be():
    seen = {pair for row in ROWS for pair in itertools.combinations([(n, getattr(row, n)) for n in FACTORS], 2)}
    for first, second in itertools.combinations(FACTORS, 2):
        for levels in itertools.product(FACTORS[first], FACTORS[second]):
            can_be = any(possible(row) for values in itertools.product(*FACTORS.values())
                         if (getattr(row := Row(*values), first), getattr(row, second)) == levels)
            assert (((first, levels[0]), (second, levels[1])) in seen) is can_be


def test_bfloat16_keeps_float32_masters_and_moves_as_float32_does(one):
    """Steps far below bfloat16's spacing add up, and the very first is as large as in float32."""
    plain = Row("qwen3", 0, 0, "float32", "one", False, "", "full")
    exact = one(plain)["change"]
    for stage in (0, 1, 3):
        low = trained(Row("qwen3", stage, 0, "bfloat16", "one", False, "", "full"))["change"]
        assert low == pytest.approx(exact, rel=0.01)


def test_offload_without_a_place_for_it_is_refused():
    errors = LearnerConfig(zero_stage=0, offload_optimizer=True, offload_parameters=True).errors()
    assert any("offload_optimizer needs zero_stage 1, 2 or 3" in e for e in errors)
    assert any("offload_parameters needs zero_stage 3" in e for e in errors)
