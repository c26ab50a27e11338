# Two commands: `make demo` and `make test`. Each makes its own virtual environment in .venv.
PYTHON ?= python3
PIP = .venv/bin/pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: demo test lint types doctest unit clean

demo: .venv/installed
	.venv/bin/bandmf train --plot demo.png

test: lint types doctest unit

lint: .venv/installed-dev
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .

types: .venv/installed-dev
	.venv/bin/mypy

# The Triton kernels need a GPU's compiler to be imported at all; benchmarks/noise_gpu.py checks them.
doctest: .venv/installed-dev
	.venv/bin/python -m pytest --doctest-modules --ignore src/bandmf/torch/noise/triton_kernels.py --ignore src/bandmf/torch/noise/triton_executor.py src/bandmf

# One process a core; more threads in each would only get in each other's way.
unit: .venv/installed-dev
	OPENBLAS_NUM_THREADS=1 OMP_NUM_THREADS=1 .venv/bin/python -m pytest -n 2 --dist loadfile tests

.venv/bin/python:
	$(PYTHON) -m venv .venv

# torch first: the constraint picks one build, so that nothing later pulls in another.
.venv/installed: .venv/bin/python pyproject.toml constraints.txt
	$(PIP) torch
	$(PIP) --editable ".[torch]" scikit-learn
	touch $@

.venv/installed-dev: .venv/bin/python pyproject.toml constraints.txt
	$(PIP) torch
	$(PIP) --editable ".[dev]"
	touch $@ .venv/installed

clean:
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache build demo.png
