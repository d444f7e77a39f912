"""Tiny models of several families, and rows with branches and in-trunk actions."""

from __future__ import annotations

import numpy as np
import torch

from mopd.rows import Action, Row

VOCABULARY = 61
COMMON = dict(
    vocab_size=VOCABULARY,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    pad_token_id=0,
    bos_token_id=None,
    eos_token_id=1,
)
MOE = dict(moe_intermediate_size=16, intermediate_size=32, num_experts_per_tok=2)


def make_model(family: str, seed: int = 0, **changes):
    """A random float32 model of `family` whose weights are large enough that attention and routing matter."""
    import transformers as t

    config = {
        "qwen3_moe": lambda: t.Qwen3MoeConfig(
            **COMMON, **MOE, head_dim=8, num_experts=4, norm_topk_prob=True, **changes
        ),
        "qwen3": lambda: t.Qwen3Config(**COMMON, intermediate_size=48, head_dim=8, **changes),
        "llama": lambda: t.LlamaConfig(**COMMON, intermediate_size=48, **changes),
        "mistral_window": lambda: t.MistralConfig(**COMMON, intermediate_size=48, sliding_window=7, **changes),
        "gemma2": lambda: t.Gemma2Config(
            **COMMON,
            intermediate_size=48,
            head_dim=8,
            sliding_window=6,
            final_logit_softcapping=5.0,
            attn_logit_softcapping=20.0,
            **changes,
        ),
        "mixtral": lambda: t.MixtralConfig(**COMMON, intermediate_size=32, num_local_experts=4, num_experts_per_tok=2),
        "olmoe": lambda: t.OlmoeConfig(**COMMON, intermediate_size=32, num_experts=4, num_experts_per_tok=2),
        "qwen2_moe": lambda: t.Qwen2MoeConfig(**COMMON, **MOE, shared_expert_intermediate_size=32, num_experts=4),
        "deepseek_v3": lambda: t.DeepseekV3Config(
            **{**COMMON, "num_key_value_heads": 4},
            **MOE,
            n_routed_experts=4,
            n_group=1,
            topk_group=1,
            n_shared_experts=1,
            first_k_dense_replace=1,
            q_lora_rank=16,
            kv_lora_rank=16,
            qk_rope_head_dim=8,
            qk_nope_head_dim=8,
            v_head_dim=8,
        ),
        "mimo_v2_flash": lambda: t.MiMoV2FlashConfig(
            **COMMON,
            moe_intermediate_size=16,
            intermediate_size=32,
            num_experts_per_tok=2,
            n_routed_experts=4,
            head_dim=8,
            v_head_dim=4,
            layer_types=["full_attention", "sliding_attention"],
            mlp_layer_types=["dense", "sparse"],
            sliding_window=6,
        ),
    }[family]()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = t.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.data.normal_(0.0, 0.15)
    if family not in ("gemma2", "mimo_v2_flash"):  # sdpa has neither soft caps nor sinks
        model.set_attn_implementation("sdpa")
    return model


def random_action(rng, at: int, n: int, *, branch: bool, trunk=None, turn=0, sequence=0, group=0, version=0) -> Action:
    tokens = rng.integers(2, VOCABULARY, n).astype(np.uint32) if branch else trunk[at : at + n]
    return Action(
        at,
        tokens,
        rng.normal(-2, 0.3, n).astype(np.float32),
        np.full(n, version, np.int32),
        branch,
        turn,
        sequence,
        group,
    )


def branch_row(
    rng, *, size: int, branches: int, points: int = 1, domain="game", stream="teacher_prefix", group=0
) -> Row:
    """A trunk with `points` decision points and `branches` fresh turns at each; turns of 1 to 6 tokens."""
    trunk = rng.integers(2, VOCABULARY, size).astype(np.uint32)
    places = sorted(rng.choice(np.arange(1, size + 1), points, replace=False).tolist())
    actions, number = [], group * 100
    for turn, at in enumerate(places):
        for _ in range(branches):
            actions.append(
                random_action(
                    rng, at, int(rng.integers(1, 7)), branch=True, turn=turn, sequence=number, group=group * 10 + turn
                )
            )
            number += 1
    return Row(domain, stream, trunk, tuple(actions), f"branch row {group}")


def rollout_row(rng, *, size: int, turns: int, domain="game", stream="rollout", group=0) -> Row:
    """A trunk with `turns` actions inside it."""
    trunk = rng.integers(2, VOCABULARY, size).astype(np.uint32)
    starts = np.linspace(1, size - 3, turns).astype(int)
    actions = tuple(
        random_action(
            rng, int(at), 2 + turn % 2, branch=False, trunk=trunk, turn=turn, sequence=group * 100, group=group * 10
        )
        for turn, at in enumerate(starts)
    )
    return Row(domain, stream, trunk, actions, f"rollout row {group}")


def mixed_rows(rng, count: int, domains=("game", "science")) -> list[Row]:
    rows = []
    for i in range(count):
        domain = domains[i % len(domains)]
        size = int(rng.integers(6, 40))
        rows.append(
            rollout_row(rng, size=size, turns=2, domain=domain, group=i)
            if i % 3 == 0
            else branch_row(rng, size=size, branches=2, points=2, domain=domain, group=i)
        )
    return rows


def repeated_prefix_logits(model, rows) -> torch.Tensor:
    """Logits [N, V] of every loss token in row order, each action forwarded alone behind its own prefix."""
    parts = []
    for row in rows:
        for action in row.actions:
            ids = np.concatenate([row.trunk[: action.at], action.tokens]).astype(np.int64)
            logits = model(input_ids=torch.from_numpy(ids)[None], use_cache=False).logits[0]
            parts.append(logits[action.at - 1 : action.at - 1 + len(action.tokens)])
    return torch.cat(parts)


def detached_prefix_logits(model, rows) -> torch.Tensor:
    """The same with prefix_gradient "none": all but the last token of each prefix fill a key/value cache without a
    graph, and the rest is forwarded behind it."""
    from transformers import DynamicCache

    parts = []
    for row in rows:
        for action in row.actions:
            ids = torch.from_numpy(np.concatenate([row.trunk[: action.at], action.tokens]).astype(np.int64))[None]
            cache, before = DynamicCache(config=model.config), action.at - 1
            if before:
                with torch.no_grad():
                    model.model(input_ids=ids[:, :before], past_key_values=cache, use_cache=True)
            logits = model(input_ids=ids[:, before:], past_key_values=cache, use_cache=True).logits[0]
            parts.append(logits[: len(action.tokens)])
    return torch.cat(parts)
