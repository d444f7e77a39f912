#!/usr/bin/env bash
# A real pretrained model: SmolLM2-135M-Instruct learns from itself after supervised training, served by vLLM.
#
#   scripts/smollm2_run.sh [RUN]        everything goes to RUN (runs/smollm2): model, teacher, store, student, logs
#
# PYTHON runs mopd (.venv/bin/python), SERVE_PYTHON the server where vLLM has an environment of its own. What is there
# already is not made again. It took about half an hour on two cores that other work filled.
set -euo pipefail
cd "$(dirname "$0")/.."
run=${1:-runs/smollm2}
python=${PYTHON:-.venv/bin/python}
serve_python=${SERVE_PYTHON:-$python}
config=configs/smollm2.yaml
export DS_ACCELERATOR=${DS_ACCELERATOR:-cpu} OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

mkdir -p "$run"
"$python" scripts/get_smollm2.py "$run/smollm2"
[ -f "$run/teacher/manifest.json" ] || "$python" -m mopd.cli teacher sft "$config" embodied run="$run" --out "$run/teacher"
[ -d "$run/store" ] || "$python" -m mopd.cli collect "$config" run="$run"

"$serve_python" -m mopd.cli teacher serve "$run/teacher" embodied --port 8765 --dtype float32 --max-model-len 1024 \
    >"$run/server.log" 2>&1 &
server=$!
trap 'kill $server 2>/dev/null; wait $server 2>/dev/null || true' EXIT
until grep -q "http://127.0.0.1:8765" "$run/server.log" && "$python" - <<'ASK'
import sys, urllib.request
try:
    urllib.request.urlopen("http://127.0.0.1:8765/health", timeout=5)
except OSError:
    sys.exit(1)
ASK
do
    kill -0 $server || { cat "$run/server.log" >&2; exit 1; }
    sleep 2
done
"$python" -m mopd.cli check "$config" run="$run"
"$python" -m mopd.cli train "$config" run="$run"
"$python" - "$run" <<'TABLE'
import json, pathlib, sys
for path in sorted(pathlib.Path(sys.argv[1], "students").rglob("metrics.jsonl")):
    for line in path.read_text().splitlines():
        record = json.loads(line)
        if numbers := record.get("domains", {}).get("embodied"):
            print(f"step {record['step']:3d}  reverse KL {numbers['reverse_kl']:6.3f}  sampled tokens {record['tokens']['sampled']}")
TABLE
