"""docs/recipes.md says what the estimates say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mopd.check_estimate import estimate_record
from mopd.config import load_config
from mopd.launch import machine_count

ROOT = Path(__file__).resolve().parents[2]
LINES = [line for line in (ROOT / "docs" / "recipes.md").read_text().splitlines() if line.startswith("| `")]


@pytest.mark.parametrize("line", LINES, ids=lambda line: line.split("`")[1])
def test_the_table_is_what_mopd_check_estimates(line):
    name = line.split("`")[1]
    config = load_config(ROOT / "configs" / name)
    found = estimate_record(config)
    assert found["warnings"] == [] and found["peak"] < 0.9 * found["have"]
    work, host = found["work"], sum(found["host"].values()) * config.placement.learner.ranks_per_node
    numbers = [machine_count(config.placement), found["ranks"], f"{found['peak']:.1f} of {found['have']:.0f}", f"{host:.0f}",
               f"{work['tokens'] / 1e6:.2f} M / {work['sampled_tokens'] / 1e6:.2f} M", f"{work['petaflops']['training']:.0f}",
               f"{found['seconds']['training']:.0f}", f"{found['seconds']['sampling']:.0f}"]
    assert line == f"| `{name}` | {' | '.join(map(str, numbers))} |"


def test_every_recipe_is_in_the_table():
    there = {path.name for path in (ROOT / "configs").glob("qwen3_30b_a3b_*.yaml")} | {"mimo_v2_flash_paper.yaml"}
    assert {re.search("`(.+?)`", line)[1] for line in LINES} == there
