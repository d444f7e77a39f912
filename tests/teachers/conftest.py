"""A small tokenizer and model folders for the teachers' tests."""

from __future__ import annotations

import os

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import pytest  # noqa: E402

from mopd.learner.model import TinyMoEConfig, new_tiny_moe, save_model  # noqa: E402
from mopd.sampling.demo_tokenizer import train_tokenizer  # noqa: E402

TEXT = ["go north", "open the door", "take the red key", "you see a door and a key", "look around the room"] * 4


@pytest.fixture(scope="session")
def tokenizer():
    return train_tokenizer(TEXT, 300)


@pytest.fixture(scope="session")
def make_folder(tmp_path_factory, tokenizer):
    """make_folder(seed) -> a model folder with the shared tokenizer; make_folder(seed, other) with another."""

    def make(seed: int = 0, speaks=None):
        speaks = speaks or tokenizer
        model = new_tiny_moe(
            TinyMoEConfig(hidden_size=32, layers=2, head_dim=8, expert_size=16, experts=4),
            vocabulary=len(speaks),
            seed=seed,
            pad_id=speaks.pad_token_id,
            bos_id=None,
            eos_id=speaks.eos_token_id,
        )
        return save_model(model, tmp_path_factory.mktemp("model") / f"seed{seed}", tokenizer=speaks)

    return make
