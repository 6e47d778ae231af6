# make demo    the whole way on real and on simulated data; pictures and tables in demo/
# make test    the test suite
# make check   format, lint, strict types and a smoke test, the last two on the built wheel
# make bench   the scripts behind every number in the README and the docs
#
# All of them share one environment, made once and made again when pyproject.toml changes.
PYTHON ?= python3
VENV ?= .venv

# One thread a process: on one machine the answers are then the same twice, and busy cores are not fought over.
export OMP_NUM_THREADS ?= 1
export MKL_NUM_THREADS ?= 1

PY := $(VENV)/bin/python
INSTALLED := $(VENV)/.installed

.PHONY: help demo test check bench
help:
	@sed -n 's/^# \(make .*\)/\1/p' Makefile

demo: $(INSTALLED)
	$(VENV)/bin/pyro-sparse demo --out demo

test: $(INSTALLED)
	$(PY) -P -m pytest -n auto --maxprocesses 2

check: $(INSTALLED)
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	.ci/check_wheel $(PY)

bench: $(INSTALLED)
	$(PY) benchmarks/foundation.py
	$(PY) benchmarks/regression_table.py
	$(PY) benchmarks/lemma.py
	$(PY) benchmarks/real_data.py diabetes

$(INSTALLED): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "pyro_sparse needs Python 3.11 or newer, and '$(PYTHON)' is: $$($(PYTHON) --version 2>&1)." >&2; \
	  echo "Name another one, for instance: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	@echo "Making $(VENV): about 6 GB, a minute or two."
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check -e ".[dev]"
	@touch $@
