"""One family of each kind for all tests of this room: a Java process starts once."""

from __future__ import annotations

import pytest

from mopd.environments.registry import make_family

OPTIONS = {
    "textworld_express": {},
    "scienceworld": {"tasks": ["find-non-living-thing", "lifespan-longest-lived"]},
    "babyai": {"sizes": {"train": 300, "development": 50, "test": 50}},
}


@pytest.fixture(scope="session")
def families():
    made = {name: make_family(name, options) for name, options in OPTIONS.items()}
    yield made
    for family in made.values():
        family.close()


@pytest.fixture(params=list(OPTIONS))
def family(request, families):
    return families[request.param]
