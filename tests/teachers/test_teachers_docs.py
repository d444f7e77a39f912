"""docs/teachers.md shows the table of planted faults as the tests plant them."""

from __future__ import annotations

from pathlib import Path

from tests.vllm.faults import table

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "teachers.md"


def test_the_table_of_faults_is_the_one_that_is_tested():
    text = DOCUMENT.read_text()
    shown = text.split("<!-- faults:begin -->")[1].split("<!-- faults:end -->")[0].strip()
    assert shown == table(), "write the table of tests/vllm/faults.py into docs/teachers.md: python -m tests.vllm.faults"
