"""The benchmark of the store runs at a tiny size: every back end gives the same prefixes, and the table can be made."""

import importlib.util
import json
import os
import pathlib

import pytest

pytest.importorskip("pyarrow", reason="the benchmark compares with Parquet")
pytest.importorskip("lmdb", reason="the benchmark compares with LMDB")


def test_a_tiny_run(tmp_path, monkeypatch):
    path = pathlib.Path(__file__).parents[2] / "benchmarks" / "bench_store.py"
    spec = importlib.util.spec_from_file_location("bench_store", path)
    bench = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(__import__("sys").modules, "bench_store", bench)
    spec.loader.exec_module(bench)
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # nothing here is measured
    tiny = bench.SIZES["tiny"]
    result = {"machine": bench.machine(), "append": bench.bench_append(tmp_path / "append", tiny)}
    result |= {"reads": [bench.bench_reads(tmp_path / "reads", 80, tiny)], "open": bench.bench_open(tmp_path / "open", tiny)}
    result["writers"] = {"1": {"seconds": 1.0, "MB_per_s": 1.0}}  # four processes are too much for a test
    table = bench.table(json.loads(json.dumps(result)))
    assert "append 20 × 200 tokens" in table and "prefix from 80 points" in table and "open 20 segments" in table
    assert {b.name for b in bench.BACKENDS} == set(result["append"]["by"]) == set(result["reads"][0]["by"])
    assert all(entry["bytes"] > 0 and entry["MB_per_s"] > 0 for entry in result["append"]["by"].values())
    assert result["reads"][0]["reader"]["peak_MiB"] > 10
