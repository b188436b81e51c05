# Everything runs in an environment of its own, made on first use; PYTHON chooses the interpreter for it.
VENV ?= .venv
JOBS ?= 2
PYTHON ?= python3
ARGS ?=
SGLANG ?= sglang==0.5.23
# The oldest release that the extra takes; requirements/dev.txt has the newest.
TRANSFORMERS ?= 5.17.0

BIN := $(VENV)/bin
# One thread for each test process: several processes that each use every core are slower than none.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest

.DEFAULT_GOAL := help
.PHONY: help venv demo bench figures site test quick imports sglang transformers lint format types clean

help:
	@echo 'make demo     compute FP8 sparse MLA attention here, check it and time it (ARGS="--help": its options)'
	@echo 'make bench    measure speed and accuracy here (ARGS="--quick --report out": its options)'
	@echo 'make figures  write the figures of README.md from the newest benchmarks/results/*.json'
	@echo 'make site     build the error reference in build/site, a page for each error'
	@echo 'make test     every test that this machine can run (ARGS="-k merge": some of them)'
	@echo 'make quick    the tests without the slow ones'
	@echo 'make imports  the tests of who may import whom, and of the time an import takes'
	@echo 'make sglang   the tests of sparse_mla.integrations.sglang, against the wheel of one release'
	@echo 'make transformers  those of sparse_mla.integrations.transformers, against an older release (TRANSFORMERS=5.17.0)'
	@echo 'make lint     ruff: rules and format        make format  let ruff mend what it can'
	@echo 'make types    mypy, strict                  make clean   remove $(VENV) and caches'

venv:
	@PYTHON='$(PYTHON)' tools/venv.sh '$(VENV)'

demo: venv
	$(BIN)/sparse-mla demo $(ARGS)

bench: venv
	$(BIN)/sparse-mla bench $(ARGS)

figures: venv
	$(BIN)/python -m sparse_mla.benchmarks.readme

site: venv
	$(BIN)/sparse-mla errors build --out build/site

test: venv
	$(PYTEST) -n $(JOBS) --dist worksteal $(ARGS)

quick: venv
	$(PYTEST) -n $(JOBS) --dist worksteal -m 'not slow' $(ARGS)

imports: venv
	$(PYTEST) tests/test_imports.py

# Its wheel alone, in a folder of its own: what it needs to run is several GB, and its file asks for none of it.
sglang: venv
	test -d build/$(SGLANG) || $(BIN)/python -m pip install --quiet --no-deps --target build/$(SGLANG) $(SGLANG)
	PYTHONPATH=build/$(SGLANG) $(PYTEST) tests/test_integrations_sglang.py

# With what it needs, in a folder of its own: an older one wants an older huggingface_hub than the environment has.
# All else is as pinned.
transformers: OLDER = build/transformers-$(TRANSFORMERS)
transformers: venv
	test -d $(OLDER) || grep -Ev '^(transformers|huggingface_hub)==' requirements/dev.txt | \
		$(BIN)/python -m pip install --quiet --constraint /dev/stdin --target $(OLDER) transformers==$(TRANSFORMERS)
	PYTHONPATH=$(OLDER) $(BIN)/python -c 'import transformers as t; assert t.__version__ == "$(TRANSFORMERS)", t.__file__'
	PYTHONPATH=$(OLDER) $(PYTEST) tests/test_integrations_transformers.py

lint: venv
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .

format: venv
	$(BIN)/python -m ruff check --fix .
	$(BIN)/python -m ruff format .

types: venv
	$(BIN)/python -m mypy

clean:
	rm -rf '$(VENV)' build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find sparse_mla tests -name __pycache__ -type d -prune -exec rm -rf {} +
