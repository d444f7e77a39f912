"""`sampling.engine`: what is refused before anything is loaded, what `mopd check` says, and engines of one's own."""

import sys
import types

import numpy as np
import pytest

from mopd.config import ConfigError
from mopd.sampling.base import SamplingOptions
from mopd.sampling.engines import check_engine, describe_engine, factory, make_engine
from mopd.sampling.hf import HFEngine
from mopd.sampling.vllm_turns import told_of


@pytest.mark.parametrize(("overrides", "said"), [
    (["sampling.engine=vlm"], "sampling.engine: 'vlm' is not one of hf, vllm, server"),
    (["sampling.engine=server"], "sampling.urls: missing"),
    (["sampling.engine=server", "sampling.urls=[127.0.0.1:80]"], r"sampling.urls\[0\]: '127.0.0.1:80' is not an address"),
    (["sampling.engine=server", "sampling.urls=[http://u:secret@h:1]"], "an address holds no user name or key"),
    (["sampling.engine=server", "sampling.urls=[http://a:1,http://a:1]"], "an address stands there twice"),
    (["sampling.stop_strings=[a,'']"], "sampling.stop_strings: .* must be texts that are not empty"),
    (["sampling.urls=[http://a:1]"], "sampling.urls: the engine 'hf' does not read it"),
    (["sampling.vllm_options.dtype=float32"], "sampling.vllm_options: the engine 'hf' does not read them"),
    (["sampling.engine=vllm", "sampling.vllm_options.dtype=fp8"], "vllm_options.dtype: 'fp8' is not one of"),
    (["sampling.engine=vllm", "sampling.vllm_options.max_model_len=100"], "max_model_len: 100 is less than the"),
    (["sampling.engine=vllm", "train.temperature=0.001"], "vLLM samples at 0 .* or from 0.01 on"),
    (["sampling.engine=server", "sampling.urls=[http://a:1]", "train.routing_replay=true"], "are not asked which experts"),
    (["sampling.engine=server", "sampling.urls=[http://a:1]", "train.top_p=0.9"], "set train.top_k besides"),
    (["sampling.engine=server", "sampling.urls=[http://a:1]", "sampling.overlap=1", "sampling.samplers=2"],
     "sampling.samplers: 2 samplers share 1 servers"),
    (["sampling.engine_options={a: 1}"], "sampling.engine_options: are for an engine of your own"),
])
def test_what_does_not_fit_is_refused_with_its_key(tiny_run, overrides, said):
    with pytest.raises(ConfigError, match=said):
        tiny_run.config(*overrides)


def test_the_secret_of_an_address_is_not_repeated(tiny_run):
    with pytest.raises(ConfigError) as error:
        tiny_run.config("sampling.engine=server", "sampling.urls=[http://u:secret@h:1]")
    assert "secret" not in str(error.value)


def test_hf_is_made_of_the_given_model_or_of_the_folder(tiny_run):
    from mopd.learner.model import load_model

    config = tiny_run.config("train.sampling_batch=5")
    one, other = make_engine(config), make_engine(config, load_model(config.student.model))
    text = np.arange(3, 20).astype(np.uint32)
    assert isinstance(one, HFEngine) and one.max_batch == 5
    assert one.score(text).tolist() == other.score(text).tolist()
    assert describe_engine(config)["engine"] == "hf"


class Own(HFEngine):
    pass


def test_an_engine_of_ones_own_is_called_and_checked(tiny_run, monkeypatch):
    from mopd.learner.model import load_model

    module = types.ModuleType("their_engines")
    asked = {}

    def make(config, **given):
        asked.update(given)
        return Own(load_model(config.student.model), max_batch=config.sampling.engine_options["rows"])

    module.make, module.poor, module.number = make, lambda config, **_: object(), 3
    monkeypatch.setitem(sys.modules, "their_engines", module)
    config = tiny_run.config("sampling.engine=their_engines:make", "sampling.engine_options={rows: 3}")
    engine = make_engine(config, number=1, of=2)
    assert isinstance(engine, Own) and engine.max_batch == 3 and (asked["number"], asked["of"]) == (1, 2)
    assert describe_engine(config) == {"engine": "their_engines:make", "where": "an engine of your own", "can": []}
    with pytest.raises(ValueError, match="which lacks generate, submit"):
        make_engine(tiny_run.config("sampling.engine=their_engines:poor"))
    with pytest.raises(ValueError, match="has no 'number' that can be called"):
        factory("their_engines:number")
    with pytest.raises(ValueError, match="cannot import 'no_such_engines'"):
        factory("no_such_engines:make")
    assert check_engine(engine, "x") is engine


def test_a_server_that_does_not_answer_is_said_by_check(tiny_run):
    import socket

    from mopd.check import check_launch

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    config = tiny_run.config("sampling.engine=server", f"sampling.urls=[http://127.0.0.1:{port}]",
                             "sampling.engine_wait_s=0")
    [error] = check_launch(config)["errors"]
    assert error.startswith("sampling.engine: no server of the student answers") and "connection refused" in error


def test_how_many_ids_an_engine_must_tell_of():
    def told(limit, rows=300, **options):
        return told_of(SamplingOptions(**options), limit, rows)

    assert told(0) == told(0, top_k=300) == told(0, temperature=0, top_k=5) == 0
    assert told(20, top_k=4) == 20 and told(-1, top_k=40, top_p=0.5) == 80 and told(-1, top_p=0.5) == 300
    with pytest.raises(ValueError, match="tells of 20 ids a token, and it takes 21"):
        told(20, top_k=20)
    with pytest.raises(ValueError, match="top_p 0.5: which ids it leaves is known only where"):
        told(20, top_p=0.5)
