# make serve         installs asyncllm into .venv and serves the built-in model (MODEL=... for another)
# make check         what to run while working: lint, types and the quick tests, in a minute or two
# make test          lint, types and all tests, as CI runs them
# make test-gpu      the tests of kernels, graphs and the engine, on a machine with an NVIDIA GPU
# make sizes         lines and files by room, the longest files, the fullest folders
# make test-floors   the smoke tests with the oldest dependencies that pyproject.toml allows

VENV   ?= .venv
PYTHON ?= python3
MODEL  ?=
PORT   ?= 8000
# Extras to install for serving: EXTRAS=cuda on a machine with an NVIDIA GPU.
EXTRAS ?=
# Where PyTorch comes from, if not from PyPI. Without a GPU: https://download.pytorch.org/whl/cpu
TORCH_INDEX ?=
# Processes that run the tests, of one thread each: many tests wait, so there is one more than the
# machine has processors. A gigabyte or two is what each takes.
WORKERS ?= $(shell expr $$(getconf _NPROCESSORS_ONLN) + 1)

PIP    = $(VENV)/bin/python .ci/install.py --constraint constraints.txt
PYTEST = OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -q \
	--numprocesses $(WORKERS) --maxprocesses 8 --dist loadfile --no-loadscope-reorder

define INSTALL
@echo "Installing asyncllm$(1) and what it needs into $(VENV); the first time, PyTorch is downloaded."
$(if $(TORCH_INDEX),$(PIP) torch --index-url $(TORCH_INDEX))
$(PIP) --editable '.$(1)'
@touch $@
endef

.PHONY: serve check test tests test-gpu sizes lint style types programs test-floors clean

serve: $(VENV)/.serve-$(EXTRAS)
	$(VENV)/bin/asyncllm serve $(MODEL) --port $(PORT)

check: lint
	$(PYTEST) -m "not slow" tests/unit tests/test_smoke.py

# Programs are installed beside the test environment, and mypy, of one thread, runs beside the tests.
test:
	@$(MAKE) --no-print-directory --jobs 2 --output-sync=target style programs
	@$(MAKE) --no-print-directory --jobs 2 types tests
	@$(MAKE) --no-print-directory sizes

# They are collected once before: else each worker would compile all of them, and what they import.
tests: $(VENV)/.serve-test
	@OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -q --collect-only | tail -n 1
	MAKEFLAGS= $(PYTEST) --durations=50

# Tests that measure what is free on a GPU, or divide it, run one after the other.
test-gpu: $(VENV)/.serve-test
	$(PYTEST) -m "not whole_gpu" tests/gpu tests/kernels
	$(PYTEST) --numprocesses 0 -m whole_gpu tests/gpu

sizes:
	@$(PYTHON) .ci/sizes.py

lint: style types

style: $(VENV)/.serve-test
	$(VENV)/bin/ruff check asyncllm tests examples tools
	$(VENV)/bin/ruff format --check asyncllm tests examples tools
	$(VENV)/bin/lint-imports --no-logo
	$(VENV)/bin/hadolint docker/Dockerfile

types: $(VENV)/.serve-test
	$(VENV)/bin/mypy asyncllm tests
	$(VENV)/bin/mypy examples

# The tests of the page want a Chromium, and one of the dashboard a Prometheus. Root on Debian gets
# them; where there is none, those tests are skipped.
programs:
	@missing=; \
	command -v chromium >/dev/null || command -v google-chrome >/dev/null || missing=chromium; \
	command -v prometheus >/dev/null || missing="$$missing prometheus"; \
	[ -z "$$missing" ] || { \
		[ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && echo "Installing for the tests: $$missing" && \
		apt-get update -qq && DEBIAN_FRONTEND=noninteractive \
		apt-get install -qq --yes --no-install-recommends $$missing >/dev/null 2>&1; \
	} || echo "Missing: $$missing. Their tests will be skipped."

# PyTorch alone stays at the version of constraints.txt: uv keeps what is installed already.
test-floors: $(VENV)/bin/python
	$(PIP) --quiet uv
	$(PYTHON) -m venv --clear $(VENV)-floors
	$(VENV)-floors/bin/python -m pip install --quiet --constraint constraints.txt --no-deps \
		torch $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX))
	$(VENV)/bin/uv pip install --python $(VENV)-floors/bin/python --resolution lowest-direct --editable .
	$(VENV)/bin/uv pip install --python $(VENV)-floors/bin/python pytest
	OMP_NUM_THREADS=1 $(VENV)-floors/bin/python -m pytest -q -c /dev/null --rootdir . --noconftest \
		-p no:cacheprovider tests/test_smoke.py

$(VENV)/.serve-%: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(call INSTALL,$(if $*,[$*]))

$(VENV)/.serve-: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(call INSTALL)

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else \
		"asyncllm needs Python 3.11 or newer, and $(PYTHON) is %d.%d: name a newer one, as in make serve PYTHON=python3.12" % sys.version_info[:2])'
	$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }

clean:
	rm -rf $(VENV) $(VENV)-floors
