# Set-up and the everyday commands. Needs CPython 3.11 or newer, a package index, and nothing else.
PYTHON ?= python3
CORES ?= 2
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# The newest transformers that this was tested on; kvpress holds the main venv at 5.2.
NEWEST ?= 5.24.0
NEWEST_VENV := .venv-newest
NEWEST_STAMP := $(NEWEST_VENV)/.installed-$(NEWEST)
# The Triton that the GPU kernels are tested with, in its interpreter: no GPU is needed.
TRITON ?= 3.7.1
TRITON_VENV := .venv-triton
TRITON_STAMP := $(TRITON_VENV)/.installed-$(TRITON)
SLURM_PACKAGES := slurmctld slurmd slurm-client munge
SLURM_STAMP := $(VENV)/.installed-slurm
# The benchmark's tests that need neither kvpress nor datasets.
NEWEST_BENCHMARK := reading choosing storing answering running records costs quest

export HF_HUB_DISABLE_PROGRESS_BARS := 1
export HF_HUB_DISABLE_TELEMETRY := 1
export TQDM_MININTERVAL := 10
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_PROGRESS_BAR := off
export TOKENIZERS_PARALLELISM := false
# the venv's own python, whatever else is on the caller's path
export PATH := $(CURDIR)/$(BIN):$(PATH)

.PHONY: help setup demo offline test test-package test-workflow test-kill test-report test-newest test-triton \
  test-slurm test-slurm-short lint format docs chromium slurm clean-results
.DEFAULT_GOAL := help

help:
	@echo "make setup          .venv with everything, at the versions of requirements.lock"
	@echo "make demo           setup, then the default run: real small models, results in results/demo"
	@echo "make offline        setup, then the same models with enough contexts to quote, results in results/offline"
	@echo "make test           setup, then every test; its halves: make test-package, make test-workflow"
	@echo "make test-kill      setup, then the whole workflow killed at twenty moments, against one left alone"
	@echo "make test-report    setup, Chromium by apt-get if there is none, then the page of a run inside it"
	@echo "make test-newest    the package's tests on transformers $(NEWEST) without kvpress, in a venv of their own"
	@echo "make test-triton    the GPU kernels' tests in the interpreter of triton $(TRITON), in a venv of their own"
	@echo "make test-slurm     Slurm by apt-get if there is none, then the whole workflow through one that it starts"
	@echo "make test-slurm-short  the same with one model and one arm, up to the tables"
	@echo "make lint           setup, then ruff, snakefmt and snakemake --lint"
	@echo "make format         setup, then let ruff and snakefmt rewrite the files"
	@echo "make docs           setup, then the documentation as HTML in docs/site; a warning is an error"
	@echo "make clean-results  remove results/*/ (models and texts in resources/ stay)"
	@echo "CORES=$(CORES) is what demo and offline use (a number or all); PYTHON=$(PYTHON) makes the venv"

setup: $(STAMP)

$(STAMP): pyproject.toml requirements.lock
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "contourkv needs CPython 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version 2>&1 || true)." >&2; \
	  echo "Name another one: make $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 1; }
	@echo "Installing contourkv and what it needs into $(VENV): one to three minutes."
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint requirements.lock --editable '.[workflow,benchmark,dev,docs]'
	@touch $@

demo: setup
	$(BIN)/snakemake --cores $(CORES)
	@echo; ls results/demo/report.html results/demo/summary.md results/demo/figures/*.png results/demo/tables/*.md results/demo/benchmark/*.md

offline: setup
	$(BIN)/snakemake --cores $(CORES) --configfile config/offline.yaml
	@echo; ls results/offline/report.html results/offline/summary.md results/offline/figures/*.png results/offline/tables/*.md

# Two halves side by side, each with one thread.
test: setup
	OMP_NUM_THREADS=1 $(MAKE) --no-print-directory --jobs 2 --keep-going test-package test-workflow

test-package: setup
	$(BIN)/python -m pytest tests --ignore tests/workflow

test-workflow: setup
	$(BIN)/python -m pytest tests/workflow --ignore tests/workflow/test_report_page.py \
	  --ignore tests/workflow/test_kill.py

# The whole workflow, killed over and over; CONTOURKV_KILL_SEED=... takes other moments.
test-kill: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/workflow/test_kill.py

# Needs a browser, which no index of Python packages has; its screenshots stay in results/test-artefacts.
test-report: setup chromium
	$(BIN)/python -m pytest tests/workflow/test_report_page.py

chromium:
	@for name in chromium chromium-browser google-chrome; do command -v $$name >/dev/null && exit 0; done; \
	  { apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium; } || { \
	  echo "No Chromium, and apt-get cannot install it here: install one, or run this as root." >&2; exit 1; }

test-newest: $(NEWEST_STAMP)
	CONTOURKV_WITHOUT_KVPRESS=1 OMP_NUM_THREADS=1 $(NEWEST_VENV)/bin/python -m pytest tests/ragged tests/press \
	  tests/capture tests/test_held.py tests/test_cli.py tests/test_audit.py tests/test_loss.py \
	  $(addprefix tests/benchmark/test_, $(addsuffix .py, $(NEWEST_BENCHMARK)))

$(NEWEST_STAMP): pyproject.toml requirements.lock
	$(PYTHON) -m venv --clear $(NEWEST_VENV)
	grep -viE '^(transformers|tokenizers|huggingface_hub|hf-xet|typer|typer-slim)==' requirements.lock > $(NEWEST_VENV)/constraints
	$(NEWEST_VENV)/bin/python -m pip install --quiet --constraint $(NEWEST_VENV)/constraints --editable . \
	  transformers==$(NEWEST) pytest hypothesis
	@touch $@

test-triton: $(TRITON_STAMP)
	CONTOURKV_WITHOUT_KVPRESS=1 OMP_NUM_THREADS=1 TRITON_INTERPRET=1 $(TRITON_VENV)/bin/python -m pytest tests/with_triton

$(TRITON_STAMP): pyproject.toml requirements.lock
	$(PYTHON) -m venv --clear $(TRITON_VENV)
	$(TRITON_VENV)/bin/python -m pip install --quiet --constraint requirements.lock --editable . triton==$(TRITON) \
	  pytest hypothesis
	@touch $@

# One node on loopback, as whoever calls; its daemons end with the tests, the packages stay.
test-slurm: $(SLURM_STAMP) slurm
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/slurm --durations 5

test-slurm-short: $(SLURM_STAMP) slurm
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/slurm/test_profile.py --durations 5

$(SLURM_STAMP): $(STAMP)
	$(BIN)/python -m pip install --quiet --constraint requirements.lock --editable '.[workflow,slurm]'
	@touch $@

slurm:
	@command -v munged >/dev/null && command -v slurmctld >/dev/null && command -v slurmd >/dev/null && \
	  command -v sbatch >/dev/null || \
	  { apt-get update -qq && apt-get install -y -qq --no-install-recommends $(SLURM_PACKAGES); } || { \
	  echo "No Slurm, and apt-get cannot install it here: install $(SLURM_PACKAGES), or run this as root." >&2; exit 1; }

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/snakefmt --check Snakefile workflow
	$(BIN)/snakemake --lint

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/snakefmt Snakefile workflow

docs: setup
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --nitpicky --quiet -c docs . docs/site
	@echo; ls docs/site/docs/index.html

clean-results:
	rm -rf -- results/*/
