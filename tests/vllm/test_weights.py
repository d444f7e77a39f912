"""New weights in a real vLLM on the CPU, in process and over HTTP: taken whole, proved, and vLLM's own mistake is seen."""

from __future__ import annotations

import shutil
from pathlib import Path

import httpx2
import numpy as np
import pytest
import torch

from mopd.learner.engine import Learner, LearnerConfig
from mopd.learner.model import load_model
from mopd.sampling.sync import WeightFolder, WeightFolderError, WeightsDiffer, publish, read_folder, take
from mopd.sampling.vllm_local import VLLMEngine, VLLMRefuses
from mopd.sampling.vllm_weights import (
    DeviceTransfer,
    ServerWeights,
    TransferRefused,
    serve_arguments,
    serve_environment,
)
from tests.vllm.conftest import Server, free_port

BOTH_NUMBERS = r"log-probability -\d+\.\d+, the learner -\d+\.\d+ \(they may differ by 0.001\)"


def make_dense(folder: Path, seed: int) -> Path:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(Qwen3Config(
        vocab_size=304, hidden_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=32,
        intermediate_size=96, max_position_embeddings=1024, initializer_range=0.2, tie_word_embeddings=False))
    model.save_pretrained(folder)
    return folder


class Trained:
    """A learner with another model than the engine began with; every version has other weights."""

    def __init__(self, folder: Path, place: Path):
        self.learner = Learner(load_model(folder), config=LearnerConfig(), total_steps=1)
        self.place, self.version = WeightFolder(place, shard_bytes=60_000), 0

    def step(self):
        """The next version's folder."""
        with torch.no_grad():
            for parameter in self.learner.model.parameters():
                parameter.mul_(1.02)
        self.version += 1
        return publish(self.learner, self.place, self.version, layout="checkpoint")

    def close(self):
        self.learner.close()
        self.place.close()


@pytest.fixture
def trained(tmp_path):
    made = []

    def make(folder: Path) -> Trained:
        made.append(Trained(folder, tmp_path / f"weights-{len(made)}"))
        return made[-1]

    yield make
    for one in made:
        one.close()


def damage(folder: Path) -> None:
    """Change one bit of one shard."""
    shard = next(folder.glob("*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)


def plain_reload(engine: VLLMEngine, folder: Path) -> None:
    """What vLLM offers by itself."""
    engine._llm.collective_rpc("reload_weights", kwargs={"weights_path": str(folder)})
    engine._llm.reset_prefix_cache()


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_in_process_a_version_is_taken_whole_where_vllm_alone_keeps_old_experts(kind, models, tmp_path, trained):
    start = make_dense(tmp_path / "start", 1) if kind == "dense" else models["embodied"]
    other = trained(make_dense(tmp_path / "other", 2) if kind == "dense" else models["game"])
    engine = VLLMEngine(start, dtype="float32", max_batch=4, max_model_len=256)
    try:
        made = other.step()
        probe = read_folder(made.path).probe
        with pytest.raises(WeightsDiffer, match=f"after step 1 the engine gives token .* {BOTH_NUMBERS}"):
            probe.check(engine.score(probe.tokens), version=1)
        other.learner.model.save_pretrained(tmp_path / "saved")
        plain_reload(engine, tmp_path / "saved")
        if kind == "dense":
            assert probe.check(engine.score(probe.tokens), version=1) < 1e-4
        else:
            with pytest.raises(WeightsDiffer, match=BOTH_NUMBERS):
                probe.check(engine.score(probe.tokens), version=1)
        for _ in range(2):
            taken = take(engine, made.path, other.version)
            assert taken.gap < 1e-4 and engine.version == taken.version == other.version
            made = other.step()
        damage(made.path)
        with pytest.raises(Exception, match="is not what was written"):
            take(engine, made.path, other.version)
        last = read_folder(other.step().path)
        assert take(engine, last.path, other.version).gap < 1e-4
    finally:
        engine.close()


def test_experts_that_only_a_gpu_tells_are_refused_before_anything_is_loaded(models):
    with pytest.raises(VLLMRefuses, match="train.routing_replay: vLLM tells which .* needs a GPU; take sampling.engine=hf"):
        VLLMEngine(models["game"], report_experts=True)


@pytest.fixture(scope="module")
def student_server(models, tmp_path_factory):
    """A server that takes weights, with the model "embodied"."""
    from teachers.serve import ServeOptions

    log = tmp_path_factory.mktemp("student") / "server.log"
    with pytest.MonkeyPatch.context() as patch:
        for name, value in serve_environment().items():
            patch.setenv(name, value)
        server = Server(ServeOptions(str(models["embodied"]), "student", port=free_port(), dtype="float32", max_model_len=512,
                                     extra=("--max-num-seqs", "8", *serve_arguments())), log)
        server.start()
    try:
        server.wait()
        yield server
    finally:
        server.stop()


def test_all_servers_take_a_version_and_one_that_does_not_is_named_until_it_has(student_server, servers, models, trained):
    other = trained(models["game"])
    url, closed, dead = student_server.url, servers["game"].url, f"http://127.0.0.1:{free_port()}"
    fleet = ServerWeights([url, closed, dead], timeout_s=60)
    try:
        made = other.step()
        found = fleet.take(made.path, 1)
        assert found[url].words == "" and found[url].gap < 1e-4 and set(fleet.out) == {closed, dead}
        assert "VLLM_SERVER_DEV_MODE=1" in found[closed].words
        assert f"{dead} did not take the weights of step 1" in fleet.out[dead]
        fleet.check(url, 1)

        # A prefix that was cached under the old weights says nothing under the new ones.
        tokens = np.arange(2, 200, dtype=np.uint32)
        body = {"model": "student", "prompt": tokens.tolist(), "max_tokens": 1, "temperature": 0.0, "logprobs": 1}
        made = other.step()
        answers = []
        for version in (None, 2):
            if version:
                assert fleet.take(made.path, version, keep=True, only=[url])[url].words == ""
            answer = [httpx2.post(f"{url}/v1/completions", json=body, timeout=60).json() for _ in range(2)][-1]
            answers.append(answer["choices"][0]["logprobs"]["token_logprobs"][0])
        ids = torch.from_numpy(tokens.astype(np.int64))[None]
        now = torch.log_softmax(other.learner.model(input_ids=ids, use_cache=False).logits[0, -1].detach(), -1)
        assert answers[1] == pytest.approx(float(now.max()), abs=1e-4) and abs(answers[0] - answers[1]) > 1e-3

        # Somebody began an update and went away; and a folder that the server cannot read.
        httpx2.post(f"{url}/start_weight_update", timeout=60).raise_for_status()
        assert fleet.take(other.step().path, 3, only=[url])[url].words == ""
        made = other.step()
        gone = made.path.with_name("elsewhere")
        shutil.copytree(made.path, gone)
        damage(gone)
        found = fleet.take(gone, 4, only=[url])
        assert "/update_weights" in found[url].words and url in fleet.out
        assert fleet.take(made.path, 4, only=[url])[url].gap < 1e-4 and url not in fleet.out
        httpx2.post(f"{url}/update_weight_version", json={"new_version": "9"}, timeout=60).raise_for_status()
        with pytest.raises(Exception, match="says that it has the weights of step 9, not 4"):
            fleet.check(url, 4)
        with pytest.raises(WeightFolderError, match="holds version 4, not 5"):
            fleet.take(made.path, 5)
        module = publish(other.learner, other.place, 6)
        with pytest.raises(WeightFolderError, match="layout 'module', vLLM takes 'checkpoint'"):
            fleet.take(module.path, 6)
        for transfer in ("nccl", "ipc"):
            with pytest.raises(TransferRefused, match=f"{transfer} moves weights between GPUs, and this machine has none"):
                DeviceTransfer(other.learner, fleet, transfer, rank=0)
    finally:
        fleet.close()
