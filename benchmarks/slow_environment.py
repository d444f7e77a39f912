"""Any domain's environments, every call of which takes `factor` times as long: what bench_overlap.py slows down."""

from __future__ import annotations

import time

from mopd.environments.registry import make_family


class _Slow:
    """An environment whose `reset` and `step` take `factor` times as long; everything else is its own."""

    def __init__(self, inner, factor: float):
        self._inner, self._factor = inner, factor

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def _timed(self, call, *arguments, **options):
        began = time.perf_counter()
        found = call(*arguments, **options)
        time.sleep((self._factor - 1) * (time.perf_counter() - began))
        return found

    def reset(self, *arguments, **options):
        return self._timed(self._inner.reset, *arguments, **options)

    def step(self, action):
        return self._timed(self._inner.step, action)


class _SlowFamily:
    def __init__(self, inner, factor: float):
        self._inner, self._factor = inner, factor

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def create(self):
        return _Slow(self._inner.create(), self._factor)


def family(*, environment: str, factor: float = 60.0, **options):
    """`environment` with its options, slowed `factor` times."""
    return _SlowFamily(make_family(environment, options), factor)
