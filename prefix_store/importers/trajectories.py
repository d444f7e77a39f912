"""Trajectories that agent frameworks save: SWE-agent and mini-SWE-agent, verifiers (prime-rl), TALES.

SWE-agent: one JSON object per file with `history` (all messages) and `info`. mini-SWE-agent: `messages` and `info`, or in
old files the list of messages alone. verifiers: rows of results.jsonl with `prompt`, `completion`, `reward`; or of
traces.jsonl with `traces`, each a graph of message nodes. TALES: one row per step, a file is a run of episodes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from prefix_store.importers.base import Conversation, ImportOptions, RowRefused, field, number, text_id
from prefix_store.importers.chat import conversation, outcome_of
from prefix_store.importers.messages import check_order, normalise, unicode_text
from prefix_store.importers.reading import Row

TALES_COLUMNS = ("Step", "Observation", "Action")
RESTART = "-= Restarting =-"
EPISODE = "tales episode"
BASH_TOOL = {"type": "function", "function": {
    "name": "bash", "description": "Execute a bash command", "parameters": {
        "type": "object", "properties": {"command": {"type": "string", "description": "The bash command to execute"}},
        "required": ["command"]}}}  # fmt: skip
"""The one tool of mini-SWE-agent's tool-call models, which its files do not list (models/utils/actions_toolcall.py)."""


# ---------------------------------------------------------------------------------------------------------------
# SWE-agent, mini-SWE-agent


def from_swe_agent(row: Mapping[str, Any], options: ImportOptions) -> Conversation:
    """A SWE-agent .traj: `history` of the agent that acted last; messages marked `is_demo` are context. Only messages
    of type "action" (or, in old files, all of the assistant's) are decision points."""
    history = [m for m in field(row, "history", list) if isinstance(m, Mapping)]
    if len(history) != len(row["history"]):
        raise RowRefused("wrong field", "field 'history' holds something that is not an object")
    agents = [m["agent"] for m in history if isinstance(m.get("agent"), str)]
    history = [m for m in history if m.get("agent", agents[-1] if agents else None) == (agents[-1] if agents else None)]
    kept = []
    for message in history:
        ids = message.get("tool_call_ids")
        one = dict(message)
        if isinstance(ids, list) and ids and isinstance(ids[0], str):
            one["tool_call_id"] = ids[0]
        one.pop("thinking", None)
        if message.get("is_demo") is True or message.get("message_type") not in (None, "action"):
            one["loss"] = False
        kept.append(one)
    messages = normalise(kept)
    check_order(messages, users_in_a_row=True)
    info = field(row, "info", Mapping, {})
    talk = conversation({}, messages, None, options)
    return _coding(talk, row, info, "swe-agent", text_id(info, "swe_agent_version"), "submitted", options)


def from_mini_swe_agent(row: Mapping[str, Any], options: ImportOptions) -> Conversation:
    """A mini-SWE-agent .traj.json. The last message with role "exit" (or empty, in old files) says only how the run
    ended and is left out; the tool of tool-call models is given to the template."""
    messages = [dict(m) if isinstance(m, Mapping) else m for m in field(row, "messages", list)]
    while messages and isinstance(messages[-1], dict) and (
            messages[-1].get("role") == "exit" or (messages[-1].get("role") == "user" and not messages[-1].get("content"))):
        messages.pop()
    messages = normalise(messages)
    check_order(messages, users_in_a_row=True)
    tools = [BASH_TOOL] if any(m.get("tool_calls") for m in messages) else None
    talk = conversation({}, messages, tools, options)
    info = field(row, "info", Mapping, {})
    return _coding(talk, row, info, "mini-swe-agent", text_id(info, "mini_version"), "Submitted", options)


def _coding(talk: Conversation, row: Mapping[str, Any], info: Mapping[str, Any], name: str, version: str, done: str,
            options: ImportOptions) -> Conversation:
    """Fill in what a coding trajectory says of itself. The files do not know whether the patch was right: a run that was
    submitted counts as a success unless the row has `resolved`, `success`, `reward` or `score`."""
    status = text_id(info, "exit_status")
    resolved = row.get("resolved", info.get("resolved"))
    if {"success", "reward", "score"} & row.keys():
        talk.reward, talk.success = outcome_of(row, options)
    else:
        talk.success = resolved if isinstance(resolved, bool) else (not status or status == done)
        talk.reward = float(talk.success)
        talk.outcome_metadata = {"judged_by": "resolved" if isinstance(resolved, bool) else "exit_status"}
    talk.environment, talk.environment_version = name, version
    talk.domain = field(row, "domain", str, options.domain)
    talk.task = text_id(row, "instance_id", "task")
    if status:
        talk.metadata["exit_status"] = status
    return talk


# ---------------------------------------------------------------------------------------------------------------
# verifiers


def from_verifiers(row: Mapping[str, Any], options: ImportOptions) -> Conversation | list[Conversation]:
    """A rollout of results.jsonl (one conversation), or an episode of traces.jsonl (one per branch of each trace's
    message graph; only nodes that a model sampled are decision points, and each in the first branch that has it)."""
    if isinstance(row.get("traces"), list):
        return [talk for trace in row["traces"] for talk in _trace(trace, row, options)]
    if isinstance(row.get("nodes"), list):
        return _trace(row, {}, options)
    _check_error(row)
    prompt = row.get("prompt")
    prompt = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else field(row, "prompt", list)
    completion = row.get("completion")
    if isinstance(completion, str):
        completion = [{"role": "assistant", "content": completion}]
    completion = field({"completion": completion}, "completion", list)
    messages = normalise(prompt) + normalise(completion)
    for message in messages[: len(prompt)]:
        if message["role"] == "assistant":
            message["loss"] = False
    check_order(messages, users_in_a_row=True)
    talk = conversation({}, messages, row.get("tool_defs") or row.get("tools"), options)
    reward = number(row, "reward", None)
    return _rollout(talk, row, reward, text_id(row, "env_id"), text_id(row, "example_id", "id"), options)


def _check_error(row: Mapping[str, Any]) -> None:
    if row.get("error"):
        error = row["error"]
        detail = error.get("error_chain_repr") or error.get("error") if isinstance(error, Mapping) else error
        raise RowRefused("the rollout ended with an error", str(detail)[:200])


def _rollout(talk: Conversation, row: Mapping[str, Any], reward: float | None, environment: str, task: str,
             options: ImportOptions) -> Conversation:
    if reward is not None:
        talk.reward, talk.success = reward, reward >= options.success_reward
    talk.domain = field(row, "domain", str, options.domain)
    talk.environment = environment
    name = row.get("task")
    talk.task = f"{name}:{task}" if isinstance(name, str) and name and task else task
    metrics = row.get("metrics")
    if isinstance(metrics, Mapping):
        talk.outcome_metadata = {"metrics": dict(metrics)}
    if isinstance(row.get("answer"), str):
        talk.metadata["answer"] = row["answer"]
    return talk


def _trace(trace: Any, episode: Mapping[str, Any], options: ImportOptions) -> list[Conversation]:
    if not isinstance(trace, Mapping):
        raise RowRefused("wrong field", "field 'traces' holds something that is not an object")
    errors = trace.get("errors")
    if isinstance(errors, list) and errors and trace.get("ok") is not True:
        last = errors[-1] if isinstance(errors[-1], Mapping) else {}
        raise RowRefused("the rollout ended with an error", f"{last.get('type', '')}: {last.get('message', '')}"[:200])
    nodes = field(trace, "nodes", list)
    parents = []
    for place, node in enumerate(nodes):
        parent = node.get("parent") if isinstance(node, Mapping) else -1
        if parent is not None and (not isinstance(parent, int) or isinstance(parent, bool) or not 0 <= parent < place):
            raise RowRefused("wrong field", f"node {place} is no message node with an earlier parent")
        parents.append(parent)
    rewards = trace.get("rewards")
    scores = [number(r, "score", 0.0) * number(r, "weight", 1.0)
              for r in (rewards.values() if isinstance(rewards, Mapping) else ()) if isinstance(r, Mapping)]
    task = field(trace, "task", Mapping, {})
    data = task["data"] if isinstance(task.get("data"), Mapping) else {}
    environment = text_id(episode["env"], "id") if isinstance(episode.get("env"), Mapping) else ""
    talks, covered = [], set()
    for leaf in (n for n in range(len(nodes)) if n not in parents):
        path: list[int] = []
        at: int | None = leaf
        while at is not None:
            path.insert(0, at)
            at = parents[at]
        messages = normalise([nodes[n].get("message") for n in path])
        for n, message in zip(path, messages, strict=True):
            if message["role"] == "assistant" and (nodes[n].get("sampled") is not True or n in covered):
                message["loss"] = False
        covered.update(path)
        check_order(messages, users_in_a_row=True)
        talk = conversation({}, messages, trace.get("tools"), options)
        name = {"task": task["type"]} if isinstance(task.get("type"), str) else {}
        about = name | {"metrics": trace.get("metrics"), "domain": episode.get("domain")}
        talks.append(_rollout(talk, about, sum(scores) if scores else None, environment,
                              text_id(data, "id", "idx", "name") or text_id(task, "key"), options))
    return talks


# ---------------------------------------------------------------------------------------------------------------
# TALES


def tales_episodes(rows: Iterator[Row], path: Any) -> Iterator[Row]:
    """Steps of a TALES rollouts file put together to episodes, {EPISODE: [steps], "environment", "file"}; an episode
    begins where the game was started again. A row that is no step is handed on as it is."""
    steps: list[Any] = []
    first: Any = None
    about = {"environment": path.parent.name, "file": path.name}
    for row in rows:
        value = row.value
        if not isinstance(value, dict) or not set(TALES_COLUMNS) <= value.keys():
            yield row
            continue
        seen, step = value["Observation"], value["Step"]
        again = isinstance(seen, str) and RESTART in seen or step == 1
        if steps and again:
            yield Row(first, {EPISODE: steps} | about)
            steps = []
        if not steps:
            first = row.where
        steps.append(value)
    if steps:
        yield Row(first, {EPISODE: steps} | about)


def from_tales(row: Mapping[str, Any], options: ImportOptions) -> Conversation:
    """A TALES episode as its zero-shot agent had it: each observation and "\\n> " from the user, each action from the
    assistant (with `Thinking` as its reasoning where there is some). Reward is the best normalised score; it succeeded
    where that is 1."""
    if not all(isinstance(step, Mapping) for step in field(row, EPISODE, list)):
        raise RowRefused("wrong field", "a step is not an object")
    messages: list[dict[str, Any]] = []
    actions, scores = [], []
    for place, step in enumerate(row[EPISODE]):
        seen = unicode_text(field(step, "Observation", str), place)
        seen = seen.rpartition(RESTART)[2].lstrip("\n") if place == 0 else seen
        action = unicode_text(field(step, "Action", str), place).strip()
        messages += [{"role": "user", "content": f"{seen}\n> "}, {"role": "assistant", "content": action}]
        if field(step, "Thinking", str, ""):
            messages[-1]["reasoning_content"] = unicode_text(step["Thinking"], place)
        score, best = number(step, "Score", 0.0), number(step, "Max Score", 0.0)
        scores.append(number(step, "Normalized Score", score / best if best else 0.0))
        actions.append(action)
    talk = conversation({}, messages, None, options)
    named = re.search(r"_s([0-9]{1,18})_", field(row, "file", str))
    talk.environment = talk.task = field(row, "environment", str)
    talk.seed = int(named.group(1)) if named else 0
    talk.reward = max(scores, default=0.0)
    talk.success = talk.reward >= 1.0
    talk.domain, talk.actions = options.domain, actions
    last = row[EPISODE][-1].get("Feedback")
    talk.metadata = {"scores": scores} | ({"final_observation": last} if isinstance(last, str) else {})
    return talk


# ---------------------------------------------------------------------------------------------------------------
# Recognising


def is_swe_agent(row: Mapping[str, Any]) -> bool:
    return isinstance(row.get("history"), list) and "messages" not in row


def is_mini_swe_agent(row: Mapping[str, Any]) -> bool:
    info, form = row.get("info"), row.get("trajectory_format")
    return isinstance(row.get("messages"), list) and (
        (isinstance(form, str) and form.startswith("mini-swe-agent"))
        or (isinstance(info, Mapping) and "mini_version" in info))


def is_verifiers(row: Mapping[str, Any]) -> bool:
    if isinstance(row.get("traces"), list) or (isinstance(row.get("nodes"), list) and "rewards" in row):
        return True
    rollout = {"prompt", "completion"} <= row.keys() and {"reward", "example_id", "metrics", "is_completed"} & row.keys()
    return bool(rollout) and "messages" not in row


def is_tales(row: Mapping[str, Any]) -> bool:
    return set(TALES_COLUMNS) <= row.keys() or EPISODE in row
