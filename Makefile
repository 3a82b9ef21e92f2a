# make serve   sets everything up and serves the built-in model (MODEL=... for another)
# make test    sets everything up and runs the checks and the tests

VENV   ?= .venv
PYTHON ?= python3
MODEL  ?=
PORT   ?= 8000
# Extras to install for serving: EXTRAS=cuda on a machine with an NVIDIA GPU.
EXTRAS ?=
# Processes that run the tests, of one thread each; a gigabyte or two is what each takes.
WORKERS ?= auto

PIP = $(VENV)/bin/python -m pip install --quiet --constraint constraints.txt

.PHONY: serve test clean

serve: $(VENV)/.serve-$(EXTRAS)
	$(VENV)/bin/asyncllm serve $(MODEL) --port $(PORT)

test: $(VENV)/.serve-test
	$(VENV)/bin/ruff check asyncllm tests examples
	$(VENV)/bin/ruff format --check asyncllm tests examples
	$(VENV)/bin/mypy asyncllm tests
	$(VENV)/bin/mypy examples
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -q \
		--numprocesses $(WORKERS) --maxprocesses 8 --dist loadfile --no-loadscope-reorder

$(VENV)/.serve-%: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PIP) --editable '.$(if $*,[$*])'
	touch $@

$(VENV)/.serve-: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PIP) --editable .
	touch $@

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

clean:
	rm -rf $(VENV)
