"""Tiny models of several families and random rows, shared by the learner's and the teachers' tests."""

from __future__ import annotations

import os

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import pytest  # noqa: E402

from tests.mopd.learner.tiny import make_model  # noqa: E402


@pytest.fixture
def moe_model():
    return make_model("qwen3_moe")
