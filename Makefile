# Each target sets up what it needs in .venv first; nothing outside this folder changes.
PYTHON ?= python3
VENV ?= .venv
RUN = $(VENV)/bin/python
# Threads that wait in a loop slow a machine down many times where cores are shared.
export OMP_WAIT_POLICY ?= passive
INSTALLED = $(VENV)/installed

.PHONY: demo test check sample slow generated mutants bench gpu study docs dist release oldest newest clean

$(INSTALLED): setup.cfg pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "Python 3.10 or newer is needed; name one with make PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --disable-pip-version-check --quiet -e '.[dev,demo]'
	touch $(INSTALLED)

## demo: the memory of deep encoders; then train, score and embed on synthetic voices, 2 to
## 4 minutes on 2 idle cores
demo: $(INSTALLED)
	$(RUN) recipes/demo/run.py

# Each process has a core to itself and the tests in a row, whose files share fixtures,
# until the other has none left.
WORKERS ?= 2
PYTEST = OMP_NUM_THREADS=1 $(RUN) -m pytest -q -n $(WORKERS) --dist worksteal

## test: the quick tests, about 5 minutes on 2 idle cores
test: $(INSTALLED)
	$(PYTEST) -m "not slow and not gpu"

## check: lint, format, types, import rules, spelling, words
check: $(INSTALLED)
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy
	$(RUN) -m mypy recipes/demo  # whose run.py has the name of the study's
	$(VENV)/bin/lint-imports
	$(VENV)/bin/codespell
	$(RUN) -m tests.docs.words
	$(RUN) -m yamllint -d '{extends: relaxed, rules: {line-length: {max: 100}}}' hparams

## sample: half of the slow tests, one case of each, drawn by SEED, which is the commit; none
## of those marked slow(drawn=False); about 3 minutes on 2 idle cores
SEED ?= $(shell git rev-parse --short HEAD 2>/dev/null || echo 0)
sample: $(INSTALLED)
	$(PYTEST) -m "slow and not gpu" --sample=$(SEED)

## slow: all slow tests, before a release
slow: $(INSTALLED)
	$(PYTEST) -m "slow and not gpu"

## generated: train EXAMPLES networks of each kind, drawn by SEED, another one each time,
## with the engine and in plain autograd; some minutes on 2 cores
EXAMPLES ?= 10000
generated: SEED := $(shell date +%s)
generated: $(INSTALLED)
	@echo "make generated EXAMPLES=$(EXAMPLES) SEED=$(SEED)"
	GENERATED_EXAMPLES=$(EXAMPLES) $(PYTEST) tests/unit/reversible/test_generated.py \
	  --hypothesis-profile=default --hypothesis-seed=$(SEED)

## mutants: sabotage the engine line by line and see that the tests notice; before a
## release, and after a change of the engine, whose commit names the result
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

## study: test the claim of equal accuracy on a corpus of yours, some hours on 2 cores:
## make study DATA=/where/corpus NOISE=/where/noise [OUTPUT= DEVICE=]; with SIZE=full
## as published, on a GPU, with the Python that has torch: RUN=python3
SIZE ?= small
STUDY = recipes/study/run.py "$(DATA)" --size $(SIZE) $(if $(NOISE),--noise_folder "$(NOISE)") \
  $(if $(OUTPUT),--output_folder "$(OUTPUT)") $(if $(DEVICE),--device $(DEVICE))
study: $(if $(filter $(VENV)/bin/python,$(RUN)),$(INSTALLED))
	@test -n "$(DATA)" || \
	  { echo "Name a corpus: make study DATA=/where/corpus NOISE=/where/noise"; exit 1; }
	$(RUN) $(STUDY)

## docs: the pages of docs/, the README and the reference of public names, into site/
docs: $(INSTALLED)
	$(RUN) -m tests.docs.yaml_reference
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --strict --quiet
	@echo "site/index.html"

## dist: the wheel and the source distribution, into dist/, checked
dist: $(INSTALLED)
	rm -rf dist
	$(RUN) -m build
	$(RUN) -m twine check --strict dist/*
	$(PYTEST) -m slow tests/release

## release: dist, and the wheel used where there is nothing but it and what it asks for
release: dist
	$(RUN) -m tests.release.wheel dist/*.whl

## oldest, newest: the tests with the oldest and the newest Python and packages allowed;
## each prints the installed versions
OLDEST ?= python3.10
NEWEST ?= python3.13
VERSIONS = import platform, torch, torchaudio; print("Python", platform.python_version(), \
  "torch", torch.__version__, "torchaudio", torchaudio.__version__)
oldest: export PIP_CONSTRAINT = $(CURDIR)/tests/release/oldest.txt
oldest:
	$(MAKE) .venv-oldest/installed PYTHON=$(OLDEST) VENV=.venv-oldest
	.venv-oldest/bin/python -c '$(VERSIONS)'
	$(MAKE) test VENV=.venv-oldest
newest: export PIP_UPGRADE = 1
newest: export PIP_UPGRADE_STRATEGY = eager
newest:
	rm -f .venv-newest/installed
	$(MAKE) .venv-newest/installed PYTHON=$(NEWEST) VENV=.venv-newest
	.venv-newest/bin/python -c '$(VERSIONS)'
	$(MAKE) test VENV=.venv-newest

clean:
	rm -rf $(VENV) .venv-oldest .venv-newest site build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
