"""Planted faults: a proxy damages a real server's answers, and the user reads what the document promises."""

from __future__ import annotations

import json
import re
import time

import numpy as np
import pytest

from teachers.scoring.requests import TeacherError, TeacherUnreachable
from tests.vllm.conftest import KEY_NAME, free_port, questions
from tests.vllm.faults import FAULTS, Fault, by_name

CAUGHT: set[str] = set()


def seen(fault: Fault, said: str) -> None:
    """What was said is what the fault's words are, … standing for anything."""
    pattern = ".+?".join(re.escape(part) for part in fault.words.split("…"))
    assert re.fullmatch(pattern + ".*", said, re.DOTALL), f"{said!r} is not {fault.words!r}"
    CAUGHT.add(fault.name)


def damage(proxy, fault: Fault) -> None:
    """Of scores only: the server still looks well."""
    after, before = fault.after, fault.before
    if after:
        proxy.after = lambda asked, status, content: (
            after(asked, status, content) if asked.scores and status == 200 else (status, content))
    if before:
        proxy.before = lambda asked: before(asked) if asked.scores else None


@pytest.fixture
def through(connect, proxy, tiny_run):
    """A backend that has met the undamaged server through the proxy, and some requests."""
    backend = connect(urls=[proxy.url], timeout_s=20.0, retries=1)
    requests = questions(len(tiny_run.tokenizer()), count=2)
    assert not any(answer.missing for answer in backend.score(requests))
    return backend, requests


@pytest.mark.parametrize("name", [f.name for f in FAULTS if f.where == "tokens"])
def test_tokens_of_a_bad_answer_are_missing_under_its_reason(name, through, proxy):
    (backend, requests), fault = through, by_name(name)
    damage(proxy, fault)
    for request, answer in zip(requests, backend.score(requests), strict=True):
        assert not np.isfinite(answer.logprob).any() and answer.logprob.shape == (len(request),)
        ((reason, count),) = answer.missing.items()
        assert count == len(request)
        seen(fault, reason)
    proxy.reset()
    assert not any(answer.missing for answer in backend.score(requests))  # nothing of it stays


@pytest.mark.parametrize("name", ["HTTP 500", "a connection that breaks", "a server that hangs"])
def test_a_server_that_does_not_answer_is_down_until_it_does(name, through, proxy):
    (backend, requests), fault = through, by_name(name)
    backend._servers.timeout_s = 1.0 if name == "a server that hangs" else 20.0
    damage(proxy, fault)
    with pytest.raises(TeacherUnreachable) as raised:
        backend.score(requests[:1])
    seen(fault, str(raised.value))
    assert sum(backend.faults.values()) >= 1
    proxy.reset()
    backend._servers.timeout_s = 20.0
    answered_again(backend, requests)
    assert backend.returns == 1


def answered_again(backend, requests, seconds: float = 30.0):
    """Ask until every token has a score, as a waiting run does: while a server that was away is still left alone, a part
    of the requests may run out of tries."""
    end = time.monotonic() + seconds
    while True:
        try:
            said = [answer.missing for answer in backend.score(requests) if answer.missing]
        except TeacherUnreachable as error:
            said = error
        if not said:
            return
        assert time.monotonic() < end, said


def test_one_bad_server_of_two_costs_nothing_but_time(connect, proxy, servers, tiny_run):
    backend = connect(urls=[servers["game"].url, proxy.url, f"http://127.0.0.1:{free_port()}"], retries=4)
    requests = questions(len(tiny_run.tokenizer()), count=12)
    backend.score(requests)
    damage(proxy, by_name("HTTP 500"))
    assert not any(answer.missing for answer in backend.score(requests))
    assert backend.faults["HTTP 500"] >= 1


def test_a_server_that_is_gone(connect):
    backend = connect(urls=[f"http://127.0.0.1:{free_port()}"], retries=1)
    for ask in (backend.identity, lambda: backend.score(questions(50, count=2))):
        with pytest.raises(TeacherUnreachable) as raised:
            ask()
        seen(by_name("a server that is gone"), str(raised.value))


@pytest.mark.parametrize(("name", "root"), [("started again with other weights", "game"),
                                            ("started again with another model", "embodied")])
def test_a_server_that_comes_back_as_another_is_turned_away(name, root, through, proxy, servers, models, monkeypatch):
    """It goes away, and comes back with the other teacher's weights, in the same folder or in another."""
    backend, requests = through
    proxy.after = lambda asked, status, content: None
    with pytest.raises(TeacherUnreachable):
        backend.score(requests[:1])
    other = servers["embodied"]

    def before(asked):
        asked.target = other.url
        if asked.content:
            found = json.loads(asked.content)
            asked.content = json.dumps(found | {"model": "embodied"}).encode()

    def after(asked, status, content):
        content = content.replace(b'"model":"embodied"', b'"model":"game"').replace(b'"id":"embodied"', b'"id":"game"')
        return status, content.replace(str(models["embodied"]).encode(), str(models[root]).encode())

    proxy.before, proxy.after = before, after
    backend._servers.clients[proxy.url].headers["Authorization"] = "Bearer a-key-of-the-tests"
    end = time.monotonic() + 30
    while True:  # the pause after the failure has to pass first
        with pytest.raises(TeacherUnreachable) as raised:
            backend.score(requests[:1])
        if "was met at first" in str(raised.value) or "other weights" in str(raised.value):
            break
        assert time.monotonic() < end, raised.value
    seen(by_name(name), str(raised.value))
    with pytest.raises(TeacherError, match="at first"):
        backend.identity()
    proxy.reset()
    answered_again(backend, requests)


def test_servers_of_one_teacher_must_serve_one_model(connect, servers):
    backend = connect(urls=[servers["game"].url, servers["embodied"].url], api_key_env=KEY_NAME)
    with pytest.raises(TeacherError) as raised:
        backend.identity()
    assert "serves" in str(raised.value)
    fault = by_name("two servers of one teacher with different models")
    if "name the right one" not in str(raised.value):
        seen(fault, str(raised.value))


def test_two_servers_with_one_name_and_different_models(connect, proxy, servers, models):
    def after(asked, status, content):
        return status, content.replace(str(models["game"]).encode(), b"/somewhere/else")

    proxy.after = after
    backend = connect(urls=[servers["game"].url, proxy.url])
    with pytest.raises(TeacherError) as raised:
        backend.identity()
    seen(by_name("two servers of one teacher with different models"), str(raised.value))


def test_another_name_than_the_configuration_says(connect):
    backend = connect(served_model="expert")
    with pytest.raises(TeacherError) as raised:
        backend.identity()
    seen(by_name("another model than the configuration names"), str(raised.value))


def test_another_tokenizer(through, proxy, tiny_run, servers):
    """The server reads text as other ids than the student: the handshake says so."""
    from teachers.handshake import introduce, tokenizer_identity

    def after(asked, status, content):
        if asked.path != "/tokenize":
            return status, content
        found = json.loads(content)
        return status, json.dumps(found | {"tokens": [t + 1 for t in found["tokens"]]}).encode()

    backend, _ = through
    proxy.after = after
    told = {key: value for key, value in backend.identity().items() if value is not None}
    with pytest.raises(TeacherError) as raised:
        introduce(tokenizer_identity(tiny_run.tokenizer()), told, teacher_id="game", backend="server")
    seen(by_name("another tokenizer"), str(raised.value))


def test_a_wrong_key_and_none(connect, servers, monkeypatch):
    monkeypatch.setenv("MOPD_TESTS_WRONG_KEY", "not-it")
    for options, name in (({"api_key_env": "MOPD_TESTS_WRONG_KEY"}, "a wrong key"), ({"api_key_env": ""}, "no key")):
        with pytest.raises(TeacherError) as raised:
            connect("embodied", **options).identity()
        seen(by_name(name), str(raised.value))
        assert "not-it" not in str(raised.value)
    monkeypatch.delenv("MOPD_TESTS_WRONG_KEY")
    with pytest.raises(TeacherError, match="MOPD_TESTS_WRONG_KEY, which should hold its key, is not set"):
        connect("embodied", api_key_env="MOPD_TESTS_WRONG_KEY")


def test_every_fault_was_planted(request):
    """Last: the table promises nothing that no test has seen (where this file runs as a whole)."""
    chosen = {item.name.split("[")[0] for item in request.session.items if item.path == request.node.path}
    if len(chosen) >= 11:
        assert {f.name for f in FAULTS} == CAUGHT
