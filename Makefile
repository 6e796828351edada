# Each target sets up what it needs in .venv first; nothing outside this folder changes.
PYTHON ?= python3
VENV ?= .venv
RUN = $(VENV)/bin/python
# Threads that wait in a loop slow a machine down many times where cores are shared.
export OMP_WAIT_POLICY ?= passive
INSTALLED = $(VENV)/installed

.PHONY: demo test check slow mutants bench gpu clean

$(INSTALLED): setup.cfg pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "Python 3.10 or newer is needed; name one with make PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --disable-pip-version-check --quiet -e '.[dev,demo]'
	touch $(INSTALLED)

## demo: train, score and embed on synthetic voices, about 10 minutes on 2 cores
demo: $(INSTALLED)
	$(RUN) recipes/demo/run.py

# Tests of one file share fixtures, and each process has a core to itself.
WORKERS ?= 2
PYTEST = OMP_NUM_THREADS=1 $(RUN) -m pytest -q -n $(WORKERS) --dist loadfile

## test: the tests that finish within 10 minutes on 2 cores
test: $(INSTALLED)
	$(PYTEST) -m "not slow and not gpu"

## check: lint, format, types, import rules, spelling
check: $(INSTALLED)
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy
	$(VENV)/bin/lint-imports
	$(VENV)/bin/codespell
	$(RUN) -m yamllint -d '{extends: relaxed, rules: {line-length: {max: 100}}}' hparams

## slow: the tests that take longer
slow: $(INSTALLED)
	$(PYTEST) -m "slow and not gpu"

## mutants: sabotage the engine line by line and see that the tests notice
mutants: $(INSTALLED)
	$(RUN) -m tests.mutants

## bench: memory and speed on this machine, results as JSON into RESULTS
RESULTS ?= results/benchmarks
bench: $(INSTALLED)
	$(RUN) -m tests.benchmarks --results $(RESULTS)

## gpu: every GPU test and every benchmark on a CUDA device, results into RESULTS;
## takes the Python that has torch: make gpu RUN=python3
gpu:
	@$(RUN) -c 'import torch, sys; sys.exit(not torch.cuda.is_available())' || \
	  { echo "No CUDA device: nothing was tested or measured."; exit 1; }
	$(RUN) -m pytest -q -m gpu
	$(RUN) -m tests.benchmarks --device cuda --results $(RESULTS)

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache
