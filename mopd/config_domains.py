"""Of a domain's configuration: its harnesses, and the processes of its environments."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mopd.environments.workers import WorkerOptions
    from mopd.sampling.harness import Harness, Harnesses

NAME = re.compile(r"[A-Za-z0-9][\w.-]*$")
WORKER_KEYS = ("worker_processes", "step_timeout_s", "reset_timeout_s", "recycle_after", "worker_memory_mib")
# keys of a domain on which no result depends
_HARNESS_KEYS = ("max_turns", "max_turn_tokens", "max_malformed", "action_format", "history_window", "thinking",
                 "thinking_end")


@dataclasses.dataclass
class HarnessConfig:
    """One of several ways in which a domain's tasks are played. What is null is as the domain says."""

    share: float = 1.0  # of the domain's tasks, relative to its other harnesses
    system_prompt: str | None = None
    max_turns: int | None = None
    max_turn_tokens: int | None = None
    max_malformed: int | None = None
    action_format: str | None = None
    history_window: int | None = None
    thinking: bool | None = None
    thinking_end: str | None = None


def harnesses(domain: Any, system_prompt: str) -> Harnesses:
    """The harnesses of a DomainConfig; `system_prompt` is its environment's own, for those that set none."""
    from mopd.sampling.harness import Harnesses

    whole = _harness(domain, system_prompt)
    if not domain.harnesses:
        return Harnesses({"": whole})
    return Harnesses({name: _over(whole, given) for name, given in domain.harnesses.items()},
                     {name: given.share for name, given in domain.harnesses.items()})


def played_otherwise(domain: Any) -> dict[str, Any]:
    """What of a DomainConfig decides how its tasks are played beside its limits and system prompt, in plain values; only
    what is not as it is by default."""
    usual = type(domain)()
    keys = ("max_malformed", "action_format", "history_window", "thinking", "thinking_end", "harnesses")
    plain = dataclasses.asdict(domain)
    return {key: plain[key] for key in keys if getattr(domain, key) != getattr(usual, key)}


def worker_options(domain: Any) -> WorkerOptions:
    """How a DomainConfig spreads its environments over processes."""
    from mopd.environments.workers import WorkerOptions

    return WorkerOptions(domain.worker_processes, domain.step_timeout_s, domain.reset_timeout_s, domain.recycle_after,
                         domain.worker_memory_mib)


def domain_errors(domains: Mapping[str, Any]) -> list[str]:
    """Every error in the harnesses and worker processes of these domains, each with its key."""
    errors: list[str] = []
    for name, domain in domains.items():
        key = f"domains.{name}"
        whole = _harness(domain, "")
        wrong = whole.errors()
        errors += [f"{key}.{error}" for error in wrong]
        for one, given in domain.harnesses.items():
            own = f"{key}.harnesses.{one}"
            if not NAME.match(one):
                errors.append(f"{own}: a harness's name has letters, digits, '_', '-' and '.' only")
            if not given.share > 0:
                errors.append(f"{own}.share: {given.share} must be positive; take a harness out that shall play nothing")
            errors += [f"{own}.{error}" for error in _over(whole, given).errors() if error not in wrong]
        if domain.worker_processes < 0:
            errors.append(f"{key}.worker_processes: {domain.worker_processes} must be at least 0 (0: none, in this process)")
        elif domain.worker_processes:
            errors += [f"{key}.{'worker_memory_mib' + error[10:] if error.startswith('memory_mib') else error}"
                       for error in worker_options(domain).errors()]
    return errors


def words_of(domains: Mapping[str, Any]) -> Callable[[Mapping[str, Any]], list[dict[str, str]]]:
    """How transcripts of these domains (DomainConfigs) become messages: with each action as its domain's harness writes it,
    of several the one with the largest share."""
    from mopd.sampling.rendering import transcript_messages

    by_name = {name: harnesses(domain, "") for name, domain in domains.items()}

    def messages(transcript: Mapping[str, Any]) -> list[dict[str, str]]:
        known = by_name.get(str(transcript.get("domain")))
        return transcript_messages(transcript) if known is None else transcript_messages(transcript, known[known.main].words)

    return messages


def thinking_of(domains: Mapping[str, Any]) -> bool | None:
    """What a chat template is told of thinking where demonstrations of these domains are rendered. Raises ValueError where
    they differ."""
    found = {name: harnesses(domain, "") for name, domain in domains.items()}
    told = {name: one[one.main].thinking for name, one in found.items()}
    if len(set(told.values())) > 1:
        raise ValueError("thinking differs between domains ("
                         + ", ".join(f"{name}: {str(value).lower()}" for name, value in told.items())
                         + "), and the chat template renders a file in one way; import domain by domain with --domain")
    return next(iter(told.values()), None)


def say_workers(domain: Any) -> str:
    """Where a domain's environments live, in words; "" for this process."""
    if not domain.worker_processes:
        return ""
    said = [f"environments in {domain.worker_processes} worker processes, at most {domain.step_timeout_s:g} s for a step and "
            f"{domain.reset_timeout_s:g} s for a reset"]
    if domain.recycle_after:
        said.append(f"a new process after {domain.recycle_after} episodes")
    if domain.worker_memory_mib:
        said.append(f"or above {domain.worker_memory_mib:g} MiB")
    return ", ".join(said)


def say_harnesses(given: Harnesses) -> list[str]:
    """Each of a domain's harnesses in words, with its share where there are several."""
    total, said = sum(given.shares.values()), []
    for name, one in given.items():
        plain = dataclasses.asdict(one)
        usual = {field.name: field.default for field in dataclasses.fields(one)}
        words = [f"{key} {plain[key]!r}" for key in ("action_format", "history_window", "thinking", "max_malformed")
                 if plain[key] != usual[key]]
        if len(given) > 1:
            said.append(f"harness {name}: {given.shares[name] / total:.0%} of the tasks, " + ", ".join(
                [f"{one.max_turns} turns of {one.max_turn_tokens} tokens", *words]))
        elif words:
            said.append(f"harness: {', '.join(words)}")
    return said


def _harness(domain: Any, system_prompt: str) -> Harness:
    from mopd.sampling.harness import Harness

    system = system_prompt if domain.system_prompt is None else domain.system_prompt
    return Harness(system_prompt=system, max_context_tokens=domain.max_context_tokens,
                   **{key: getattr(domain, key) for key in _HARNESS_KEYS})


def _over(whole: Harness, given: HarnessConfig) -> Harness:
    own = {key: getattr(given, key) for key in ("system_prompt", *_HARNESS_KEYS) if getattr(given, key) is not None}
    return dataclasses.replace(whole, **own)
