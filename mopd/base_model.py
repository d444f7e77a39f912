"""The demo's base model: a tokenizer trained on the environments' text and a tiny Mixture-of-Experts pre-trained on it.

The text is what experts and novices saw and wrote in the training tasks. The model learns every token of it (views and
actions alike), so that it knows the format and the worlds, and plays each domain a little. Its router is trained here
and nowhere else.
"""

from __future__ import annotations

import dataclasses
import hashlib
import shutil
from pathlib import Path

import numpy as np

from mopd.config import Config, ConfigError, learner_config
from mopd.environments.demonstrations import read_transcripts
from mopd.learner.checkpoint import own_folder
from mopd.learner.model import TinyMoEConfig, new_tiny_moe, save_model
from mopd.learner.supervised import SupervisedConfig, row_of_text, train_supervised
from mopd.progress import Progress
from mopd.sampling.demo_tokenizer import train_tokenizer
from mopd.sampling.rendering import ChatRenderer, transcript_messages


def make_base(config: Config, transcripts: list[Path], out: Path) -> None:
    """Train tokenizer and base model on `transcripts` (JSON lines); writes a Hugging Face folder to `out`.

    Of every domain all novice episodes and the share `base.expert_shares` (default 1) of its expert episodes are used.
    Raises ConfigError when a domain of the config has no text.
    """
    options = config.base
    if not transcripts:
        raise ConfigError("no transcripts: name at least one with --transcripts")
    chosen = []
    for path in transcripts:
        chosen += _choose(read_transcripts(path), options.expert_shares)
    missing = set(config.domains) - {t["domain"] for t in chosen}
    if missing:
        raise ConfigError(f"no transcript of {', '.join(sorted(missing))} in {', '.join(map(str, transcripts))}")
    texts = [m["content"] for t in chosen for m in transcript_messages(t)]
    tokenizer = train_tokenizer(texts, vocab_size=options.vocabulary)
    renderer = ChatRenderer(tokenizer)
    rows = []
    cut = 0
    for number, transcript in enumerate(chosen):
        last = renderer.assistant_turns(transcript_messages(transcript))[-1]
        tokens = np.concatenate([last.prompt, last.action])
        cut += len(tokens) > options.max_positions
        rows.append(row_of_text(tokens[: options.max_positions], domain=transcript["domain"], origin=str(number)))
    model = new_tiny_moe(
        TinyMoEConfig(hidden_size=options.hidden, layers=options.layers, heads=options.heads,
                      key_value_heads=options.kv_heads, head_dim=options.hidden // options.heads,
                      experts=options.experts, experts_per_token=options.experts_per_token,
                      expert_size=options.expert_intermediate, max_positions=options.max_positions),
        vocabulary=len(tokenizer), seed=config.seed, pad_id=tokenizer.pad_token_id, bos_id=None,
        eos_id=tokenizer.eos_token_id)
    progress = Progress("base model", options.steps)
    learner = dataclasses.replace(learner_config(options.optimizer, config, log_file=str(out) + ".deepspeed.log"),
                                  freeze_router=False)
    mixture = {name: domain.share for name, domain in config.domains.items()}
    supervised = SupervisedConfig(steps=options.steps, batch_rows=options.rows_per_step, mixture=mixture,
                                  token_budget=options.micro_batch_tokens, seed=config.seed, save_every=100, learner=learner)
    text = hashlib.sha256(b"".join(row.trunk.tobytes() for row in rows)).hexdigest()
    identity = [dataclasses.asdict(options), dataclasses.asdict(supervised), text]
    result = train_supervised(
        model, rows, supervised, pad_id=tokenizer.pad_token_id,
        progress=lambda p: progress.update(p.step, f"loss {p.loss:.2f}"),
        checkpoint_folder=own_folder(f"{out}.checkpoints", identity))
    parameters = sum(p.numel() for p in model.parameters())
    save_model(model, out, tokenizer=tokenizer)
    shutil.rmtree(f"{out}.checkpoints", ignore_errors=True)
    tokens = sum(len(row.trunk) for row in rows)
    print(f"result: {parameters / 1e6:.1f} M parameters, vocabulary {len(tokenizer)}, {len(rows)} episodes of "
          f"{tokens / len(rows):.0f} tokens" + (f" ({cut} cut at {options.max_positions})" if cut else "") +
          f", loss {result.losses[0]:.2f} → {sum(result.losses[-10:]) / len(result.losses[-10:]):.2f}")


def _choose(transcripts: list[dict], expert_shares: dict[str, float]) -> list[dict]:
    """All novice episodes, and per domain the first `share` of the expert's."""
    expert: dict[str, list[dict]] = {}
    chosen = []
    for transcript in transcripts:
        if all(turn["writer"] == "expert" for turn in transcript["turns"]):
            expert.setdefault(transcript["domain"], []).append(transcript)
        else:
            chosen.append(transcript)
    for domain, found in expert.items():
        chosen += found[: round(expert_shares.get(domain, 1.0) * len(found))]
    return chosen
