"""Tiny models of several families and random rows, shared by the learner's and the teachers' tests."""

from __future__ import annotations

import os

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import pytest  # noqa: E402

from tests.mopd.learner.tiny import make_model  # noqa: E402


@pytest.fixture(scope="session")
def two_ranks(tmp_path_factory):
    """The folder with what two processes did for the tests of imbalance and of portable states, started once for both."""
    from tests.mopd.learner.test_portable import write_one
    from tests.tiny_run import torchrun

    place = tmp_path_factory.mktemp("two_ranks")
    write_one(place)
    torchrun("from tests.mopd.learner import test_imbalance, test_portable\n"
             f"test_imbalance.ranks_main({str(place)!r})\ntest_portable.ranks_main({str(place)!r})\n", place, timeout=600)
    return place


@pytest.fixture
def moe_model():
    return make_model("qwen3_moe")
