# make serve   sets everything up and serves the built-in model (MODEL=... for another)
# make test    sets everything up and runs the checks and the tests

VENV   ?= .venv
PYTHON ?= python3
MODEL  ?=
PORT   ?= 8000
# Extras to install for serving: EXTRAS=cuda on a machine with an NVIDIA GPU.
EXTRAS ?=

PIP = $(VENV)/bin/python -m pip install --quiet --constraint constraints.txt

.PHONY: serve test clean

serve: $(VENV)/.serve-$(EXTRAS)
	$(VENV)/bin/asyncllm serve $(MODEL) --port $(PORT)

test: $(VENV)/.serve-test
	$(VENV)/bin/ruff check asyncllm tests examples
	$(VENV)/bin/ruff format --check asyncllm tests examples
	$(VENV)/bin/mypy asyncllm tests
	$(VENV)/bin/python -m pytest -q

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
