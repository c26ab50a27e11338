# Two commands: `make demo` and `make test`. Each makes its own virtual environment in .venv.
PYTHON ?= python3
PIP = .venv/bin/pip install --quiet --disable-pip-version-check --constraint constraints.txt
# One process a core; more threads in each would only get in each other's way.
PYTEST = OPENBLAS_NUM_THREADS=1 OMP_NUM_THREADS=1 .venv/bin/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder
# Built when bandmf is installed, and again when they change.
NATIVE = $(wildcard src/bandmf/native/*.[ch])

.PHONY: demo test test-long lint types doctest unit docs clean

demo: .venv/installed
	.venv/bin/bandmf train --plot demo.png

test: .venv/installed-dev
	$(MAKE) --jobs 2 lint types doctest
	$(MAKE) unit

lint: .venv/installed-dev
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .

types: .venv/installed-dev
	.venv/bin/mypy

doctest: .venv/installed-dev
	.venv/bin/python -m pytest --doctest-modules src/bandmf

unit: .venv/installed-dev
	$(PYTEST) -m "not long" tests

# Sweeps of minutes, which the ordinary tests have a small version of.
test-long: .venv/installed-dev
	$(PYTEST) -m long tests

# The documentation as a site, in build/site; any warning fails.
docs: .venv/installed-dev
	NO_MKDOCS_2_WARNING=1 .venv/bin/python -m mkdocs build --strict

.venv/bin/python:
	$(PYTHON) -m venv .venv

# torch first: the constraint picks one build, so that nothing later pulls in another.
.venv/installed: .venv/bin/python pyproject.toml setup.py constraints.txt $(NATIVE)
	$(PIP) torch
	$(PIP) --editable ".[torch]" scikit-learn
	touch $@

.venv/installed-dev: .venv/bin/python pyproject.toml setup.py constraints.txt $(NATIVE)
	$(PIP) torch
	$(PIP) --editable ".[dev]"
	touch $@ .venv/installed

clean:
	rm -rf src/bandmf/native/*.so .venv .mypy_cache .pytest_cache .ruff_cache build demo.png
