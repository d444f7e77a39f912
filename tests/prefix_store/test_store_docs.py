"""The examples of docs/prefix_store.md run."""

import pathlib
import re


def test_examples_run(tmp_path, monkeypatch):
    page = pathlib.Path(__file__).parents[2] / "docs" / "prefix_store.md"
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.S)
    assert len(blocks) == 4
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    for block in blocks:
        exec(compile(block, str(page), "exec"), names)
    assert len(names["groups"]) == 4 and len(names["tokens"]) == names["prefix_tokens"]
