"""Which teachers served from which step on, and how many tokens each scored: a run's manifest keeps it over restarts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class TeacherHistory:
    """Periods of a run, in order: {"from_step", "teachers": {id: {"model", "revision", "backend", "domains", "tokens"}},
    "mixtures"}. A period ends when a run resumes with other teachers. JSON values throughout."""

    def __init__(self, periods: list[dict[str, Any]] | None = None):
        self.periods = periods or []

    def begin(self, step: int, manifest: Mapping[str, Any]) -> list[str]:
        """A process starts at `step` with the teachers of TeacherRegistry.manifest; returns a sentence per change since the
        last one, none where all is the same or nothing was before."""
        now = {name: {"model": entry["model"], "revision": entry["revision"], "backend": entry.get("backend", "hf"),
                      "domains": list(entry["domains"]), "tokens": 0} for name, entry in manifest["teachers"].items()}
        mixtures = dict(manifest.get("mixtures") or {})
        if not self.periods:
            self.periods.append({"from_step": step, "teachers": now, "mixtures": mixtures})
            return []
        before = self.periods[-1]
        changes = _changes(before["teachers"], now)
        if before["mixtures"] != mixtures:
            changes.append("the weights or kinds of teacher mixtures are others")
        if changes:
            self.periods.append({"from_step": step, "teachers": now, "mixtures": mixtures})
        return [f"from step {step} on {words}" for words in changes]

    def count(self, tokens: Mapping[str, int]) -> None:
        """Add a step's scored tokens by domain to the teachers that serve it now."""
        for entry in self.periods[-1]["teachers"].values():
            entry["tokens"] += sum(tokens.get(domain, 0) for domain in entry["domains"])


def _changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    words = []
    for name in sorted(before.keys() | now.keys()):
        old, new = before.get(name), now.get(name)
        if old is None:
            words.append(f"teacher {name!r} ({_where(new)}) is new, for {_domains(new)}")
        elif new is None:
            words.append(f"teacher {name!r} no longer serves {_domains(old)}")
        else:
            if old["revision"] != new["revision"]:
                words.append(f"teacher {name!r} is {_where(new)} instead of {_where(old)}")
            if old["domains"] != new["domains"]:
                words.append(f"teacher {name!r} serves {_domains(new)} instead of {_domains(old)}")
            if old["backend"] != new["backend"]:
                words.append(f"teacher {name!r} answers through {new['backend']} instead of {old['backend']}")
    return words


def _where(entry: Mapping[str, Any]) -> str:
    return f"{entry['model'] or 'its server'} {str(entry['revision'])[:12]}".strip()


def _domains(entry: Mapping[str, Any]) -> str:
    return ", ".join(entry["domains"]) or "no domain"
