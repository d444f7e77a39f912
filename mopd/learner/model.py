"""Models on disk: load a causal LM, make the demo's tiny Mixture-of-Experts, average, and save as ordinary folders."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from prefix_store.disk import sync_folder, sync_tree


class ModelNotFound(FileNotFoundError):
    """A model folder or id that cannot be loaded; the message says what was looked for and what to do."""


class DamagedModel(ModelNotFound):
    """A model folder whose weights cannot be used; the message names the file or parameter and what to do."""


class ModelMismatch(ValueError):
    """Models that cannot be averaged; the message names the first that differs."""


@dataclasses.dataclass
class TinyMoEConfig:
    """The demo's base model: Transformers' Qwen3-MoE at about 2.7 M parameters. Any other causal LM may stand in."""

    hidden_size: int = 128
    layers: int = 4
    heads: int = 4
    key_value_heads: int = 2
    head_dim: int = 32
    experts: int = 8
    experts_per_token: int = 2
    expert_size: int = 192
    max_positions: int = 2048
    tie_embeddings: bool = True
    rope_theta: float = 10000.0
    initializer_range: float = 0.02


def new_tiny_moe(config: TinyMoEConfig, *, vocabulary: int, seed: int, pad_id: int, bos_id: int | None,
                 eos_id: int) -> nn.Module:
    """A Qwen3-MoE causal LM with random weights drawn from `seed` alone."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    shape = Qwen3MoeConfig(
        vocab_size=vocabulary, hidden_size=config.hidden_size, num_hidden_layers=config.layers,
        num_attention_heads=config.heads, num_key_value_heads=config.key_value_heads, head_dim=config.head_dim,
        num_experts=config.experts, num_experts_per_tok=config.experts_per_token, norm_topk_prob=True,
        moe_intermediate_size=config.expert_size, intermediate_size=2 * config.expert_size, decoder_sparse_step=1,
        max_position_embeddings=config.max_positions, tie_word_embeddings=config.tie_embeddings,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
        initializer_range=config.initializer_range, pad_token_id=pad_id, bos_token_id=bos_id, eos_token_id=eos_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3MoeForCausalLM(shape)
    _choose_kernels(model, "auto", "auto")
    return model.float()


def load_model(source: str | Path, *, dtype: str | torch.dtype = "float32", experts: str = "auto",
               attention: str = "auto", trust_remote_code: bool = False,
               device: str | torch.device = "cpu", revision: str | None = None) -> nn.Module:
    """A causal LM from a folder (or a hub id), weights from safetensors only.

    revision    of a hub id: branch, tag or commit
    experts     auto: grouped_mm where the family allows it (on CPU 2-4 times faster than the loop), else eager
    attention   auto: sdpa, or eager where the family has no sdpa or soft-caps its attention logits
    Raises ModelNotFound where a path-like source is not a folder or holds no config or safetensors, DamagedModel where
    its weights cannot be read, are not all there (Transformers would make the rest up) or are not finite numbers.
    """
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    source = str(source)
    check_model_source(source)
    kind = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            source, dtype=kind, use_safetensors=True, trust_remote_code=trust_remote_code, output_loading_info=True,
            **({} if revision is None else {"revision": revision}))
    except OSError as error:
        raise ModelNotFound(f"model {source!r} cannot be loaded: {error}") from error
    except (SafetensorError, RuntimeError, ValueError) as error:
        raise DamagedModel(f"model {source!r} cannot be loaded: {error}") from error
    if absent := sorted(info["missing_keys"]):
        raise DamagedModel(f"model {source!r} lacks the weights of {len(absent)} parameters, for example {absent[0]}; take a "
                           "whole copy of it, or a folder of a causal language model if this is another kind")
    for name, parameter in model.named_parameters():
        if not bool(torch.isfinite(parameter).all()):
            raise DamagedModel(f"model {source!r}: {name} holds numbers that are not finite; take another copy or checkpoint")
    _choose_kernels(model, experts, attention)
    return model.to(device)


def check_model_source(source: str | Path) -> None:
    """Raise ModelNotFound for a local model folder that is missing or incomplete; hub ids (`owner/name`) pass."""
    path = Path(source)
    looks_local = path.exists() or path.is_absolute() or str(source).startswith(".") or len(path.parts) > 2
    if not looks_local and len(path.parts) == 2 and not path.parent.exists():
        return
    if not path.is_dir():
        raise ModelNotFound(f"there is no model folder at {source}; give a Hugging Face folder (config.json with "
                            "safetensors) or a hub id of the form owner/name")
    if not (path / "config.json").is_file():
        raise ModelNotFound(f"{source} has no config.json, so it is not a Hugging Face model folder")
    if not any(path.glob("*.safetensors")):
        raise ModelNotFound(f"{source} has no .safetensors file; save the model with safe serialization "
                            "(pickled weights are not read)")
    for file in sorted(path.glob("*.safetensors")):
        if problem := _damage(file):
            raise DamagedModel(f"{file} is damaged: {problem}; copy or save it again")
    index = path / "model.safetensors.index.json"
    if index.is_file():
        try:
            wanted = set(json.loads(index.read_text())["weight_map"].values())
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DamagedModel(f"{index} is damaged ({error!r}); copy or save the model again") from error
        if absent := sorted(name for name in wanted if not (path / name).is_file()):
            raise DamagedModel(f"{source} lacks {len(absent)} of its {len(wanted)} weight files, for example {absent[0]}; "
                               "copy the whole folder")


def _damage(file: Path) -> str:
    """What is wrong with the layout of a safetensors file, "" where nothing is. Reads its header only."""
    size = file.stat().st_size
    with open(file, "rb") as opened:
        head = opened.read(8)
        length = int.from_bytes(head, "little")
        if len(head) < 8 or length > size - 8:
            return f"its {size} bytes do not hold the header"
        try:
            tensors = json.loads(opened.read(length))
            ends = [part["data_offsets"][1] for name, part in tensors.items() if name != "__metadata__"]
            end = 8 + length + max(ends, default=0)
        except (ValueError, KeyError, TypeError, AttributeError, IndexError):
            return "its header cannot be read"
    return "" if end == size else f"it has {size} bytes where its header says {end}"


def _choose_kernels(model: nn.Module, experts: str, attention: str) -> None:
    if attention == "auto":
        # sdpa has no soft cap: Transformers would leave a family's out without a word.
        capped = getattr(model.config.get_text_config(), "attn_logit_softcapping", None)
        attention = "sdpa" if model._supports_sdpa and not capped else "eager"
    model.set_attn_implementation(attention)
    if experts != "auto":
        model.set_experts_implementation(experts)
    elif model._can_set_experts_implementation():
        model.set_experts_implementation("grouped_mm")


def save_model(model: nn.Module, folder: str | Path, *, tokenizer=None, state_dict: dict | None = None,
               manifest: dict | None = None, max_shard_size: str = "2GB") -> Path:
    """Write an ordinary Hugging Face folder (sharded safetensors, config, generation config, tokenizer), whole or not
    at all: it is written aside and renamed. `manifest` goes into manifest.json. Replaces a folder of that name."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    folder = Path(folder)
    aside = folder.with_name(f".{folder.name}.writing-{os.getpid()}")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    attention = model.config._attn_implementation
    with writing(aside):
        model.save_pretrained(aside, state_dict=state_dict, max_shard_size=max_shard_size)
        model.config._attn_implementation = attention
        if getattr(model, "generation_config", None) is not None:
            model.generation_config.save_pretrained(aside)
        if tokenizer is not None:
            tokenizer.save_pretrained(aside)
        if manifest is not None:
            (aside / "manifest.json").write_text(json.dumps(manifest, indent=2, sort_keys=True) + "\n")
        publish(aside, folder)
    return folder


@contextlib.contextmanager
def writing(aside: Path, *, remove: bool = True):
    """Around the writing of a folder: what an error leaves of it is removed (but for `remove`), and a full disk is an OSError
    that names the place, whatever words the library that wrote found for it."""
    try:
        yield
    except BaseException as error:
        said = f"{error} {error.__cause__}".lower()
        full = "os error 28" in said or "no space left" in said or (
            isinstance(error, Exception) and shutil.disk_usage(aside.parent).free < 1 << 16)
        if remove:
            shutil.rmtree(aside, ignore_errors=True)
        if full:
            raise OSError(errno.ENOSPC, "No space left on device", str(aside.parent)) from error
        raise


def publish(aside: Path, folder: Path) -> None:
    """Make a finished folder visible under its name in one rename, its bytes on disk first."""
    sync_tree(aside)
    old = folder.with_name(f".{folder.name}.old-{os.getpid()}")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    aside.rename(folder)
    sync_folder(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def parameter_average(folders: Sequence[str | Path], out: str | Path | None = None,
                      weights: Sequence[float] | None = None) -> nn.Module:
    """The model whose parameters are the weighted mean (in float64) of the models in `folders`, all of one shape; with
    `out` also written there, with the first folder's tokenizer.

    The baseline that merging by distillation has to beat. Raises ModelMismatch when names or shapes differ."""
    if not folders:
        raise ModelMismatch("parameter_average needs at least one model folder")
    weights = list(weights) if weights is not None else [1.0] * len(folders)
    if len(weights) != len(folders) or sum(weights) <= 0:
        raise ModelMismatch(f"{len(folders)} folders need as many weights with a positive sum, got {weights}")
    total = sum(weights)
    result = load_model(folders[0])
    names = dict(result.named_parameters())
    sums = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in names.items()}
    for folder, weight in zip(folders, weights, strict=True):
        other = dict(load_model(folder).named_parameters())
        if other.keys() != names.keys() or any(other[n].shape != names[n].shape for n in names):
            raise ModelMismatch(f"{folder} has other parameters than {folders[0]}; only equal shapes can be averaged")
        for name, parameter in other.items():
            sums[name] += parameter.detach().double() * (weight / total)
    with torch.no_grad():
        for name, parameter in names.items():
            parameter.copy_(sums[name])
    if out is not None:
        from transformers import AutoTokenizer

        has_tokenizer = (Path(folders[0]) / "tokenizer_config.json").is_file()
        save_model(result, out, tokenizer=AutoTokenizer.from_pretrained(folders[0]) if has_tokenizer else None,
                   manifest={"kind": "parameter average", "models": [Path(f).name for f in folders],
                             "weights": [w / total for w in weights]})
    return result
