"""What several rooms' tests share."""

from __future__ import annotations

import os

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import pytest  # noqa: E402
from hypothesis import settings  # noqa: E402

# `make test` tries the same examples every time, so that a change is what breaks it; `make fuzz` tries new ones.
settings.register_profile("same", derandomize=True)
settings.register_profile("new", print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))


@pytest.fixture(scope="session")
def tiny_run(tmp_path_factory):
    """Random models, teachers and a store with a config to train from; made once, see tests/tiny_run.py."""
    from tests.tiny_run import make_tiny_run

    return make_tiny_run(tmp_path_factory.mktemp("tiny_run"))
