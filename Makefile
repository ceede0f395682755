# Every target sets up what it needs and is quick the second time.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
# Real models and images, where they are at hand; tests marked `real` say why they skip where they are not.
export TENSIGMA_DATA ?= $(realpath ../shared/data)
# Worker processes share the cores, so each keeps to one thread.
PYTEST_WORKERS ?= 2
# Share of the full torture, which takes hours.
TORTURE_SCALE ?= 1.0

.PHONY: help demo test quick lint wheel lowest bench bench-peers torture zoo docs clean
help: ## show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "make %-11s %s\n", $$1, $$2}'

# One stamp per set of extras: reinstalled only when the project's own dependency lists change.
$(VENV)/.pip:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	touch $@

$(VENV)/.demo: $(VENV)/.pip pyproject.toml constraints.txt
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[demo]'
	touch $@

$(VENV)/.dev: $(VENV)/.pip pyproject.toml constraints.txt
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	touch $@ $(VENV)/.demo

demo: $(VENV)/.demo ## compress a small CNN end to end on an embedded data set
	$(BIN)/tensigma demo

test: $(VENV)/.dev ## run all tests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(PYTEST_WORKERS) $(PYTEST_ARGS)

quick: $(VENV)/.dev ## run one case of every fast test, in less than a minute
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(PYTEST_WORKERS) -q --quick $(PYTEST_ARGS)

lint: $(VENV)/.dev ## style, types, arrows and doors between rooms
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

wheel: ## the wheel in an empty environment, with the README's example
	PYTHON=$(PYTHON) .ci/wheel

lowest: ## fast tests with the lowest versions that pyproject.toml admits; installs 6 GB
	PYTHON=$(PYTHON) PYTEST_WORKERS=$(PYTEST_WORKERS) .ci/lowest

bench: $(VENV)/.dev ## speed and memory beside peers, as ratios within one run
	$(BIN)/python benchmarks/solvers.py
	$(BIN)/python benchmarks/calibration.py
	$(BIN)/python benchmarks/export.py

bench-peers: $(VENV)/.dev ## other tools and runtimes on the same weights, for hours; continues where it stopped
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/runtimes.py $(RUNTIMES_ARGS)
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/finetuned.py
	OMP_NUM_THREADS=1 PYTHONPATH=benchmarks $(BIN)/python -m peers $(PEERS_ARGS)

torture: $(VENV)/.dev ## break it on purpose: kills, damaged files, odd networks; TORTURE_SCALE=0.1 for a tenth
	OMP_NUM_THREADS=1 PYTHONPATH=tests $(BIN)/python -m torture --scale $(TORTURE_SCALE) --out results/torture.json

zoo: $(VENV)/.dev ## every architecture of torchvision and timm families, for hours; continues where it stopped
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/zoo_coverage.py

docs: $(VENV)/.dev ## build the documentation, strictly
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

clean: ## remove the virtual environment and everything generated
	rm -rf $(VENV) site demo-output .pytest_cache .mypy_cache .ruff_cache
