"""Weights from the learner to engines: whole under every way to split them, published at once or not at all, and proved."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch

from mopd.config import Config
from mopd.config_sampling import sampling_errors
from mopd.learner.engine import Learner, LearnerConfig
from mopd.learner.weights import named_weights
from mopd.sampling.hf import HFEngine
from mopd.sampling.sync import (
    Probe,
    WeightFolder,
    WeightFolderError,
    WeightsDiffer,
    folder_weights,
    hand_over,
    publish,
    read_folder,
    take,
    verify_now,
    weights_root,
)
from mopd.sampling.vllm_weights import transfer_errors
from mopd.sampling.weight_folder import MANIFEST, OWNER
from tests.mopd.learner.tiny import make_model


@pytest.fixture
def make_learner():
    made = []

    def make(family: str = "qwen3_moe", **options) -> Learner:
        made.append(Learner(make_model(family, seed=3), config=LearnerConfig(**options), total_steps=1))
        return made[-1]

    yield make
    for learner in made:
        learner.close()


def weights(count: int = 4, size: int = 100) -> list[tuple[str, torch.Tensor]]:
    return [(f"w{i}", torch.full((size,), float(i))) for i in range(count)]


@pytest.mark.parametrize("family, options", [
    ("qwen3_moe", {"zero_stage": 0}), ("qwen3_moe", {"zero_stage": 3, "prefix_gradient": "none"}),
    ("mixtral", {"zero_stage": 2, "autoep_size": 1}), ("qwen3", {"zero_stage": 1})])
def test_what_an_engine_takes_from_a_folder_is_what_the_learner_has(family, options, make_learner, tmp_path):
    learner, place = make_learner(family, **options), WeightFolder(tmp_path / "w", shard_bytes=8000)
    made = publish(learner, place, 7)
    folder = read_folder(made.path)
    assert (folder.version, folder.layout, folder.bytes) == (7, "module", made.bytes) and len(folder.shards) > 2
    own, found = dict(named_weights(learner)), {}
    for name, tensor in folder_weights(made.path):
        found[name] = tensor.clone()
    assert found.keys() == own.keys() and all(torch.equal(found[name], tensor) for name, tensor in own.items())
    engine = HFEngine(make_model(family))
    with pytest.raises(WeightsDiffer, match="after step 7 sampler 2 gives token"):
        folder.probe.check(engine.score(folder.probe.tokens), version=7, who="sampler 2")
    taken = take(engine, made.path, 7)
    assert taken.version == engine.version == 7 and taken.gap < 1e-4


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_the_layout_of_a_checkpoint_has_a_matrix_per_expert_and_says_the_same(family, make_learner, tmp_path):
    from transformers import AutoModelForCausalLM

    learner = make_learner(family)
    made = publish(learner, WeightFolder(tmp_path / "w"), 1, layout="checkpoint")
    names = [name for name, _ in folder_weights(made.path)]
    assert any(".experts.0." in name for name in names) and not any("gate_up" in name for name in names)
    learner.model.config.save_pretrained(made.path)
    (made.path / "weights-00001.safetensors").rename(made.path / "model.safetensors")
    saved = AutoModelForCausalLM.from_pretrained(made.path, dtype=torch.float32)
    assert all(torch.equal(tensor, dict(named_weights(learner))[name]) for name, tensor in saved.named_parameters())


def test_a_hand_over_within_a_process_is_proved_with_other_tokens_for_every_version(make_learner, monkeypatch):
    learner, engine = make_learner(), HFEngine(make_model("qwen3_moe"))
    asked = []
    score = engine.score
    monkeypatch.setattr(engine, "score", lambda tokens: asked.append(tokens) or score(tokens))
    first = hand_over(learner, engine, 1)
    assert first.gap < 1e-4 and first.record()["version"] == engine.version == 1 and first.bytes == 0
    assert hand_over(learner, engine, 2).gap < 1e-4 and not np.array_equal(*asked)
    assert hand_over(learner, engine, 3, verify=False).record()["gap"] is None and len(asked) == 2
    hand_over(learner, None, 4)  # a rank without an engine only helps to gather
    load = engine.load_weights

    def one_is_lost(given, version):
        load(((name, t * 1.1 if name.endswith("1.mlp.experts.down_proj") else t) for name, t in given), version)

    monkeypatch.setattr(engine, "load_weights", one_is_lost)
    with pytest.raises(WeightsDiffer, match=r"log-probability -\d+\.\d+, the learner -\d+\.\d+ \(they may differ by 0.001\)"):
        hand_over(learner, engine, 5)


def test_an_engine_elsewhere_takes_a_folder_and_older_ones_go(make_learner, tmp_path):
    class Elsewhere(HFEngine):
        takes, layout = "folder", "module"

    learner, place = make_learner(), WeightFolder(tmp_path / "w")
    engine = Elsewhere(make_model("qwen3_moe"))
    for version in (1, 2):
        done = hand_over(learner, engine, version, place=place)
        assert done.gap < 1e-4 and done.bytes > 0 and [p.name for p in place.root.glob("[!.]*")] == [f"v-{version:08d}"]
    with pytest.raises(ValueError, match="rank 0 publishes"):
        hand_over(learner, engine, 3)


def test_which_versions_are_proved():
    assert [v for v in range(1, 7) if verify_now(1, v)] == [1, 2, 3, 4, 5, 6]
    assert [v for v in range(1, 7) if verify_now(3, v, first=v == 1)] == [1, 3, 6]
    assert [v for v in range(1, 7) if verify_now(0, v, first=v == 1)] == [1]


def test_a_version_stays_until_every_reader_has_a_newer_one(tmp_path):
    place = WeightFolder(tmp_path / "w")
    for reader in ("a", "b"):
        place.join(reader)
    for version in (1, 2, 3):
        place.write(weights(), version)

    def there():
        return sorted(int(path.name[2:]) for path in place.root.glob("[!.]*"))

    place.took("a", 3)
    assert there() == [1, 2, 3]
    place.took("b", 1)
    assert there() == [1, 2, 3]  # b has 1 and may still be reading it
    place.took("b", 2)
    assert there() == [2, 3]
    place.forget("b")
    assert there() == [3]
    place.write(weights(2), 3)  # a step that is done again
    assert [name for name, _ in folder_weights(place.path(3))] == ["w0", "w1"]
    (place.root / ".writing-00000004").mkdir()  # a writer that was killed
    place._owned.close()
    again = WeightFolder(place.root)
    assert [path.name for path in again.root.iterdir()] == [OWNER]
    again.close()
    assert not place.root.exists()


def test_never_more_than_one_shard_is_held(tmp_path):
    place, size, alive = WeightFolder(tmp_path / "w", shard_bytes=40_000), 10_000, []

    def gathered():
        for i in range(20):
            tensor = torch.full((size // 4,), float(i))
            alive.append(weakref.ref(tensor.untyped_storage()))
            assert sum(ref() is not None for ref in alive) <= 6
            yield f"w{i:02d}", tensor
            del tensor

    folder = place.write(gathered(), 1)
    assert len(folder.shards) == 5
    assert sum(1 for _ in folder_weights(folder.path)) == 20


def test_what_is_not_whole_is_refused_with_its_name(tmp_path):
    place = WeightFolder(tmp_path / "w", shard_bytes=400)
    folder = place.write(weights(), 1, probe=Probe(np.arange(3, dtype=np.uint32), np.zeros(2, np.float32), 1e-3))
    assert read_folder(folder.path).digest == folder.digest != WeightFolder(tmp_path / "o").write(weights(3), 1).digest
    with pytest.raises(WeightFolderError, match="holds version 1, not 2"):
        take(None, folder.path, 2)
    file = folder.path / folder.shards[1][0]
    whole = file.read_bytes()
    file.write_bytes(whole[:-1] + b"\x01")
    with pytest.raises(WeightFolderError, match="weights-00002.safetensors is not what was written"):
        list(folder_weights(folder.path))
    file.write_bytes(whole[:-1])
    with pytest.raises(WeightFolderError, match=f"has {len(whole) - 1} bytes instead of {len(whole)}"):
        read_folder(folder.path)
    manifest = json.loads((folder.path / MANIFEST).read_text())
    (folder.path / MANIFEST).write_text(json.dumps(manifest | {"shards": [["../../x", 1, 1]]}))
    with pytest.raises(WeightFolderError, match="outside its folder"):
        read_folder(folder.path)
    (folder.path / MANIFEST).write_text("{")
    with pytest.raises(WeightFolderError, match="cannot be read"):
        read_folder(folder.path)
    (folder.path / MANIFEST).unlink()
    with pytest.raises(WeightFolderError, match="half-written"):
        read_folder(folder.path)
    with pytest.raises(WeightFolderError, match="is gone"):
        read_folder(place.path(9))


def test_a_disk_that_takes_no_more_gives_one_error_and_leaves_nothing(make_learner, tmp_path):
    place = WeightFolder(tmp_path / "w", shard_bytes=2**20)
    place.write(weights(), 1)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    try:
        with pytest.raises(WeightFolderError, match=r"weights of step 2 could not be written to .*sampling.weights_folder"):
            publish(make_learner(), place, 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert sorted(path.name for path in place.root.iterdir()) == [OWNER, "v-00000001"]
    (tmp_path / "file").write_text("")
    with pytest.raises(WeightFolderError, match="sampling.weights_folder: .*file/w cannot be used"):
        WeightFolder(tmp_path / "file" / "w")


def test_what_a_killed_run_left_in_shared_memory_goes_with_the_next_run(tmp_path, monkeypatch):
    from mopd.sampling import weight_folder

    monkeypatch.setattr(weight_folder, "SHARED_MEMORY", tmp_path)
    code = ("import os, signal; from mopd.sampling import weight_folder as w; from pathlib import Path\n"
            f"w.SHARED_MEMORY = Path({str(tmp_path)!r})\n"
            "place = w.WeightFolder(w.weights_root('', 'killed'))\n"
            "(place.root / 'v-00000001').mkdir(); os.kill(os.getpid(), signal.SIGKILL)")
    subprocess.run([sys.executable, "-c", code], check=False)
    killed, alive = weights_root("", "killed"), WeightFolder(weights_root("", "alive"))
    assert not killed.exists() and alive.root.is_dir()
    other = WeightFolder(weights_root("", "another"))
    assert alive.root.is_dir() and other.root.is_dir()
    for place in (alive, other):
        place.close()
        place.close()
    assert not list(tmp_path.iterdir())


def test_every_run_has_a_place_of_its_own(tmp_path):
    one, other = weights_root("", tmp_path / "a"), weights_root("", tmp_path / "b")
    assert one != other and one == weights_root("", tmp_path / "a") and Path("/dev/shm") in one.parents
    assert weights_root(str(tmp_path), "a").parent == tmp_path


def test_transfers_between_gpus_need_servers_and_a_gpu():
    config = Config()
    config.sampling.weight_transfer = "nccl"
    [error] = [e for e in sampling_errors(config) if "weight_transfer" in e]
    assert error.startswith("sampling.weight_transfer: nccl goes from the learner to servers") and "engine=server" in error
    config.sampling.engine, config.sampling.urls = "server", ["http://127.0.0.1:1"]
    assert not [e for e in sampling_errors(config) if "weight_transfer" in e]
    assert len(transfer_errors(config)) == (0 if torch.cuda.is_available() else 1)
    config.sampling.weight_transfer = "file"
    assert transfer_errors(config) == []
    config.sampling.weight_transfer, config.sampling.verify_every = "carrier pigeon", -1
    found = sampling_errors(config)
    assert any("'carrier pigeon' is not one of file, nccl, ipc" in e for e in found)
    assert any(e.startswith("sampling.verify_every: -1") for e in found)
