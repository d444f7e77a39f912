"""Every way to split the student over two processes, beside one process: the same run, and what differs.

    OMP_NUM_THREADS=1 python scripts/ranks_table.py [FOLDER]

Trains the tests' tiny recipe 3 steps per row (minutes on two CPU cores, over gloo) and prints for each combination of ZeRO
stage, spread experts, recipe and precision whether the sampled tokens are the same, and the largest relative difference of
loss and gradient norm from the one-process run. Ends with status 1 where a float32 row is outside the tests' tolerance.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("DS_ACCELERATOR", "cpu")

from tests.integration.test_ranks import RECIPES, trained  # noqa: E402
from tests.tiny_run import environment, make_tiny_run  # noqa: E402

LOW = ["deepspeed.dtype=bfloat16"]
ROWS = [(recipe, stage, spread, low) for recipe in RECIPES for low in (False, True) for stage in range(4)
        for spread in (0, 1, 2) if not (spread and stage == 0) and not (low and (stage == 0 or recipe == "further"))]


def changes(recipe: str, stage: int, spread: int, low: bool) -> list[str]:
    return [*RECIPES[recipe], f"deepspeed.zero_stage={stage}", f"deepspeed.autoep_size={spread}", *(LOW if low else [])]


def on_ranks(path: str, place: str) -> None:
    """What both processes do."""
    from mopd.ranks import leave

    results = []
    for number, row in enumerate(ROWS):
        start = time.perf_counter()
        results.append(trained(path, f"{place}/{number}", *changes(*row)) | {"seconds": time.perf_counter() - start})
    if os.environ["RANK"] == "0":
        print("RESULT" + json.dumps(results), flush=True)
    leave()


def worst(mine: list[dict], theirs: list[dict], name: str) -> float:
    return max(abs(a[name] - b[name]) / abs(a[name]) for a, b in zip(mine, theirs, strict=True))


def main() -> int:
    place = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp())
    place.mkdir(parents=True, exist_ok=True)
    (place / "tiny").mkdir()
    tiny = make_tiny_run(place / "tiny")
    alone = {(recipe, low): trained(tiny.path, place / f"one-{recipe}-{low}", *changes(recipe, 1 if low else 0, 0, low))
             for recipe in RECIPES for low in (False, True) if not (low and recipe == "further")}
    code = f"import sys; sys.path.insert(0, {str(ROOT / 'scripts')!r}); from ranks_table import on_ranks; " \
           f"on_ranks({str(tiny.path)!r}, {str(place)!r})"
    (place / "ranks.py").write_text(code)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", str(place / "ranks.py")]
    done = subprocess.run(command, env=environment(), cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    found = json.loads(done.stdout[done.stdout.index("RESULT") + 6:])
    print(f"{'recipe':8} {'dtype':9} zero experts over  same tokens  loss differs  gradient norm  seconds")
    good = True
    for (recipe, stage, spread, low), result in zip(ROWS, found, strict=True):
        one = alone[recipe, low]
        same = result["sampled"] == one["sampled"]
        loss, norm = (worst(one["records"], result["records"], name) for name in ("loss", "gradient_norm"))
        good &= low or (same and loss < 2e-6 and norm < 2e-5)
        print(f"{recipe:8} {'bfloat16' if low else 'float32':9} {stage:4} {spread or 'all here':>12}  "
              f"{'yes' if same else 'no':11}  {loss:12.1e}  {norm:13.1e}  {result['seconds']:7.1f}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
