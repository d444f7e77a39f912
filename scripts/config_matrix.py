"""Ways to configure the learner, on two processes beside one: five steps each, and what differs.

    OMP_NUM_THREADS=1 python scripts/config_matrix.py [--strength 3] [--only WORD] [--json FILE]

Covers each two (with `--strength 3` each three) levels of family, ZeRO stage, spread experts, dtype, micro-batches,
checkpointing, offload and prefix graphs that can be together at all (tests/mopd/learner/configurations.py), and experts
over one and two ranks at every stage, on batches where the two ranks have other numbers of tokens and one has none, over
gloo. A minute for pairs and some for threes on two CPU cores. Prints one line a row with the largest relative
difference of loss and of gradient norm over the steps, and of the weights' whole change; ends with status 1 where a row is
outside its tolerance, fails, or counts tokens or (in float32) expert loads otherwise than one process.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("DS_ACCELERATOR", "cpu")

from tests.mopd.learner.configurations import (  # noqa: E402
    TOLERANCE,
    Row,
    differences,
    every,
    on_ranks,
    reference_of,
    spread_rows,
    trained,
)
from tests.tiny_run import environment  # noqa: E402


def chosen(strength: int, words: list[str]) -> list[Row]:
    return [row for row in dict.fromkeys([*spread_rows(), *every(strength)]) if all(word in str(row) for word in words)]


def on_two(strength: int, words: list[str]) -> list[dict]:
    """The rows on two processes, as rank 0 found them."""
    with tempfile.TemporaryDirectory() as place:
        script = Path(place) / "ranks.py"
        script.write_text(f"import sys; sys.path.insert(0, {str(ROOT / 'scripts')!r}); from config_matrix import ranks_main; "
                          f"ranks_main({strength}, {words!r})\n")
        done = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2",
                               str(script)], env=environment(), cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout[done.stdout.index("RESULT") + 6:])


def ranks_main(strength: int, words: list[str]) -> None:
    from mopd.ranks import leave

    results = on_ranks(chosen(strength, words))
    if os.environ["RANK"] == "0":
        print("RESULT" + json.dumps(results), flush=True)
    leave()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--strength", type=int, default=2, help="2: every pair of levels, 3: every three")
    parser.add_argument("--only", action="append", default=[], help="rows whose words hold this; may be repeated")
    parser.add_argument("--json", help="file for the numbers")
    given = parser.parse_args()
    rows, found = chosen(given.strength, given.only), on_two(given.strength, given.only)
    alone: dict[Row, dict] = {}
    lines, good = [], True
    print(f"{'loss':>8} {'norm':>8} {'weights':>8} {'seconds':>8}  row")
    for row, two in zip(rows, found, strict=True):
        one = alone.get(reference_of(row)) or alone.setdefault(reference_of(row), trained(reference_of(row)))
        if "error" in two:
            print(f"{'failed':>8} {'':26}  {row}: {two['error']}")
            lines.append({"row": str(row), "error": two["error"]})
            good = False
            continue
        loss, norm, change = differences(one, two)
        fits = loss <= TOLERANCE[row.dtype][0] and norm <= TOLERANCE[row.dtype][1] and one["tokens"] == two["tokens"] and (
            row.dtype != "float32" or one["counts"] == two["counts"])
        good &= fits
        print(f"{loss:8.1e} {norm:8.1e} {change:8.1e} {two['seconds']:8.1f}  {row}" + "  OUTSIDE" * (not fits), flush=True)
        lines.append({"row": str(row), "loss": loss, "norm": norm, "weights": change, "fits": fits})
    print(f"{len(rows)} rows, {sum(line.get('fits', False) for line in lines)} within the tolerance")
    if given.json:
        Path(given.json).write_text(json.dumps(lines, indent=1))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
