"""How large a causal LM is, from its config.json alone: built on the meta device, no weight is read or allocated."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

SHAPES = Path(__file__).resolve().parent.parent / "configs" / "models"  # config.json of well-known models, for estimates


class UnknownShape(ValueError):
    """A model whose config.json is not at hand; the message names it and the remedy."""


@dataclasses.dataclass(frozen=True)
class Layer:
    """Widths of one transformer layer, in elements per token.

    query, key, value   outputs of these projections over all heads
    dense               intermediate size of what every token passes: the MLP, or shared experts
    experts             routed experts, of which a token passes `chosen` of size `expert`; 0: no MoE layer
    window              tokens that attention reaches back; 0: all
    normed              queries and keys pass a norm of their own, or a low-rank bottleneck with one
    """

    query: int
    key: int
    value: int
    dense: int
    experts: int = 0
    chosen: int = 0
    expert: int = 0
    window: int = 0
    normed: bool = False


@dataclasses.dataclass(frozen=True)
class Shape:
    """A model's size. Counts are of parameters.

    parameters   all of them
    experts      of these, routed experts' (what `deepspeed.autoep_size` spreads)
    frozen       of these, routers' where they are frozen
    embedding    the input table's (no product), head the output layer's; tied where both are one
    active       that a token is multiplied with, without the output layer
    largest      of one tensor
    """

    name: str
    parameters: int
    experts: int
    frozen: int
    embedding: int
    head: int
    tied: bool
    active: int
    largest: int
    hidden: int
    vocabulary: int
    positions: int | None
    layers: tuple[Layer, ...]

    @property
    def dense(self) -> int:
        """Parameters that are not routed experts'."""
        return self.parameters - self.experts

    def cache(self, tokens: int) -> int:
        """Elements of the key/value cache of one sequence of `tokens`, as Transformers keeps it."""
        return sum((layer.key + layer.value) * min(tokens, layer.window or tokens) for layer in self.layers)


def shape_of(source: str | Path, *, trust_remote_code: bool = False, freeze_router: bool = True) -> Shape:
    """The shape of a Hugging Face folder, of a config.json, or of a well-known model by the last part of its id (see
    configs/models). Raises UnknownShape where there is no config to read."""
    import torch
    from transformers import AutoModelForCausalLM

    from mopd.learner.moe import find_routers

    config = _config(source, trust_remote_code)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    text = config.get_text_config()
    routers = find_routers(model)
    seen: dict[int, int] = {id(p): p.numel() for p in model.parameters()}
    expert = {id(p): p.numel() for router in routers for p in router.experts.parameters()}
    gates = {id(p): p.numel() for router in routers for p in router.module.parameters()} if freeze_router else {}
    table, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    layers = tuple(_layer(module, number, text) for number, module in enumerate(_layers(model)))
    used = sum(layer.chosen / layer.experts for layer in layers if layer.experts)
    mixed = sum(1 for layer in layers if layer.experts)
    inside = sum(seen.values()) - sum(expert.values()) - table.numel() - (0 if head is table else head.numel())
    return Shape(
        name=Path(str(source)).name, parameters=sum(seen.values()), experts=sum(expert.values()), frozen=sum(gates.values()),
        embedding=table.numel(), head=head.numel(), tied=head is table,
        active=inside + round(sum(expert.values()) * (used / mixed if mixed else 0.0)), largest=max(seen.values()),
        hidden=text.hidden_size, vocabulary=text.vocab_size, positions=getattr(text, "max_position_embeddings", None),
        layers=layers)


def _config(source: str | Path, trust_remote_code: bool) -> Any:
    from transformers import AutoConfig

    path, known = Path(source), SHAPES / f"{Path(str(source)).name.lower()}.json"
    for file in (path / "config.json", path if path.suffix == ".json" else known):
        if file.is_file():
            found = json.loads(file.read_text())
            kind = found.pop("model_type", "")
            if kind in known_types():
                return AutoConfig.for_model(kind, **found)
            break
    if not path.is_dir() and str(source).count("/") != 1:  # a folder that is not made yet, and no id of a hub
        raise UnknownShape(f"there is no config.json of {source} to estimate from, nor such a folder yet; make the model "
                           "first (a recipe's pipeline does, such as `mopd demo`), or name another by student.model=…")
    try:
        return AutoConfig.from_pretrained(str(source), trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise UnknownShape(f"there is no config.json of {source} to estimate from ({str(error).splitlines()[0]}); give a "
                           f"folder, or put its config.json into {SHAPES.parent.name}/{SHAPES.name} under its name in small "
                           "letters") from error


def known_types() -> set[str]:
    """Model types that Transformers knows."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return set(CONFIG_MAPPING.keys())


def _layers(model: Any) -> list[Any]:
    from torch import nn

    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) and hasattr(m[0], "self_attn")]
    return list(lists[0]) if lists else []


def _layer(module: Any, number: int, text: Any) -> Layer:
    attention = module.self_attn
    heads = text.num_attention_heads
    size = getattr(text, "head_dim", None) or text.hidden_size // heads
    if hasattr(attention, "kv_b_proj"):  # multi-head latent attention, as Transformers caches it
        key, value = heads * text.qk_head_dim, heads * text.v_head_dim
        query = key
    elif hasattr(attention, "k_proj"):
        query, key, value = (getattr(attention, n).weight.shape[0] for n in ("q_proj", "k_proj", "v_proj"))
    else:
        query = heads * size
        key = value = (getattr(text, "num_key_value_heads", None) or heads) * size
    kinds = getattr(text, "layer_types", None) or []
    window = getattr(text, "sliding_window", None) or 0
    if kinds and kinds[number] != "sliding_attention":
        window = 0
    dense, experts, expert = 0, 0, 0
    for name, parameter in module.named_parameters():
        if name.endswith("experts.gate_up_proj"):
            experts, rows, columns = parameter.shape
            expert = (columns if rows == text.hidden_size else rows) // 2
        elif name.endswith("gate_proj.weight") and ".experts." not in name:
            dense += parameter.shape[0]
        elif ".experts.0." in name and name.endswith(("gate_proj.weight", "w1.weight")):
            expert, experts = parameter.shape[0], _count(module)
    if not dense and not experts:
        dense = getattr(text, "intermediate_size", 4 * text.hidden_size)
    chosen = getattr(text, "num_experts_per_tok", 0) if experts else 0
    normed = hasattr(attention, "q_norm") or hasattr(attention, "kv_b_proj")
    return Layer(query, key, value, dense, experts, chosen, expert, window, normed)


def _count(module: Any) -> int:
    names = [name for name, _ in module.named_parameters() if ".experts." in name]
    return 1 + max(int(name.split(".experts.")[1].split(".")[0]) for name in names)
