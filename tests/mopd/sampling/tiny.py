"""Small random models for the sampling tests; large initial weights, so that their choices are not all alike."""

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

VOCABULARY = 300
COMMON = dict(
    vocab_size=VOCABULARY, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    head_dim=16, intermediate_size=96, max_position_embeddings=512, initializer_range=0.2,
)


def make(kind: str, vocabulary: int = VOCABULARY, seed: int = 0):
    """A model of `kind`: qwen3_moe, qwen3, llama, or mistral with a sliding window of 8."""
    torch.manual_seed(seed)
    options = COMMON | {"vocab_size": vocabulary}
    if kind == "qwen3_moe":
        config = Qwen3MoeConfig(
            **options, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32, tie_word_embeddings=True,
            norm_topk_prob=True,
        )
        return Qwen3MoeForCausalLM(config).eval()
    if kind == "qwen3":
        return Qwen3ForCausalLM(Qwen3Config(**options)).eval()
    if kind == "llama":
        return LlamaForCausalLM(LlamaConfig(**(options | {"num_key_value_heads": 4}))).eval()
    return MistralForCausalLM(MistralConfig(**options, sliding_window=8)).eval()
