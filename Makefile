# One virtual environment, made on demand; every target works on a bare machine with Python 3.11 to 3.14 and make.
PYTHON ?= python3
VENV   ?= .venv
BIN     = $(VENV)/bin
# One torch thread a test process: two processes fill two cores, and results do not depend on the machine's width.
ONE_THREAD = OMP_NUM_THREADS=1 MKL_NUM_THREADS=1

# Whether the environment is of a Python that runs, in our range, and has this working copy installed: a Python that
# was removed, or a folder that was moved or copied, leaves one that fails later and says nothing of why. A link is yours.
USABLE = import sys, importlib.util as u, pathlib as p; \
  sys.exit(not ((3, 11) <= sys.version_info < (3, 15) and p.Path(sys.prefix).samefile("$(VENV)") \
  and p.Path(u.find_spec("ness").origin).resolve().is_relative_to(p.Path.cwd().resolve())))
STALE := $(shell test -L $(VENV) || test ! -e $(VENV) || { $(BIN)/python -c "" && { test ! -e $(VENV)/.ready || \
  $(BIN)/python -I -c '$(USABLE)'; }; } 2> /dev/null || echo stale)

.PHONY: stale help run test test-kill kills reliability fuzz test-slow test-real test-gpu test-transformers \
        test-integrations test-triton test-ray \
        test-browser lint types tables bench docs release-checks clean

help:            ## what the targets do
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /	/'

$(VENV)/.ready: pyproject.toml constraints.txt setup.py $(STALE)
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' || \
	  { echo "$(PYTHON) is not Python 3.11 to 3.14; name one: make PYTHON=python3.12 ..." >&2; exit 1; }
	@if [ -n "$(STALE)" ]; then \
	  echo "$(VENV) is stale: its Python is gone, or the folder was moved; it is made anew" >&2; rm -rf $(VENV); fi
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[lab,dev]'
	touch $@

run: $(VENV)/.ready             ## train four methods on real digits, print the table, write the report
	$(BIN)/python -m ness table --benchmark digits --methods finetune frozen ness ness-plus --seeds 1 2 3
	@$(BIN)/python -m ness report runs/ > /dev/null

test: $(VENV)/.ready            ## set everything up and run the tests
	$(ONE_THREAD) $(BIN)/python -m pytest -q -n 2 \
	  -m "not slow and not kill and not real and not transformers and not integrations and not gpu and not browser and not ray"

test-slow: $(VENV)/.ready       ## the checks that take minutes
	$(ONE_THREAD) $(BIN)/python -m pytest -q -n 2 -m slow

test-kill: $(VENV)/.ready       ## every method killed (SIGKILL) at counted calls, every call failing once
	$(ONE_THREAD) $(BIN)/python -m pytest -q -n 2 -m kill

kills: $(VENV)/.ready           ## 200 kills in one go, figures printed
	$(ONE_THREAD) PYTHONPATH=tests $(BIN)/python tests/campaign.py kills 200

fuzz: $(VENV)/.ready            ## ten thousand fuzzed files, guided by coverage where atheris can be installed
	-$(BIN)/python -m pip install --quiet --disable-pip-version-check atheris
	$(ONE_THREAD) PYTHONPATH=tests $(BIN)/python tests/fuzz.py 10000

reliability: $(VENV)/.ready     ## all campaigns of docs/reliability.md, figures printed
	$(ONE_THREAD) PYTHONPATH=tests $(BIN)/python tests/campaign.py all 200
	$(ONE_THREAD) PYTHONPATH=tests $(BIN)/python tests/fuzz.py 10000

test-real: $(VENV)/.ready       ## the checks on real data sets (NESS_DATA=folder)
	$(ONE_THREAD) $(BIN)/python -m pytest -q -m real

test-gpu: $(VENV)/.ready        ## the checks on a CUDA GPU
	$(BIN)/python -m pytest -q -m gpu

test-transformers: $(VENV)/.ready  ## the checks against the real transformers, peft and accelerate packages
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt transformers peft accelerate
	HF_HUB_OFFLINE=1 $(ONE_THREAD) $(BIN)/python -m pytest -q -n 2 -m transformers

# torchvision, which avalanche-lib lists, would bring another torch along: its tests have a stand-in for it.
test-integrations: $(VENV)/.ready  ## the checks inside the real transformers, TRL, Lightning and Avalanche
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt transformers peft accelerate \
	  trl lightning tensorboard
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps avalanche-lib
	HF_HUB_OFFLINE=1 $(ONE_THREAD) $(BIN)/python -m pytest -q -n 2 -m "integrations or not slow" tests/integrations

test-ray: $(VENV)/.ready        ## tables on a real Ray cluster of several nodes on this machine
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt ray
	$(ONE_THREAD) $(BIN)/python -m pytest -q -m ray

test-triton: $(VENV)/.ready     ## the GPU's kernels in Triton's interpreter, without a GPU
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt triton
	TRITON_INTERPRET=1 $(ONE_THREAD) $(BIN)/python -m pytest -q -n 2 tests/lab/gpu/test_fuse.py

test-browser: $(VENV)/.ready    ## the report in a real browser (Debian's chromium; skipped where there is none)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt playwright
	$(ONE_THREAD) $(BIN)/python -m pytest -q -m browser

lint: $(VENV)/.ready            ## ruff: style and format
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .

docs: $(VENV)/.ready            ## the documentation site, into site/; warnings are errors
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

tables: $(VENV)/.ready          ## make the tables and pictures in README.md and docs/ anew from results/
	$(BIN)/python -m ness.report.documents README.md docs/*.md

types: $(VENV)/.ready           ## mypy --strict over the package
	$(BIN)/python -m mypy

bench: $(VENV)/.ready           ## speed, as ratios measured in one run
	for script in benchmarks/*.py; do $(BIN)/python $$script || exit 1; done

release-checks: lint types docs test test-transformers test-integrations test-slow test-kill  ## all that is run before a release

clean:           ## remove what the targets made
	rm -rf $(VENV) build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis
