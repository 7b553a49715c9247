# Every target sets up .venv by itself. PYTHON chooses the interpreter: make run PYTHON=/usr/bin/python3.11
PYTHON ?= python3.11
BIN := .venv/bin
READY := .venv/.ready

.PHONY: run baselines compare test check ui serve bench clean
.DELETE_ON_ERROR:

run: $(READY)            ## the whole pipeline; a second time, with nothing changed, it does no work
	@$(BIN)/python -m flows.run

baselines: $(READY)      ## the pipeline with all published methods at 2, 3 and 4 bits; goes on where it was stopped
	@$(BIN)/python -c 'import auto_round' 2>/dev/null || $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[baselines]'
	@$(BIN)/python -m flows.run --every-baseline

compare: $(READY)        ## the table and the plots of what is there, made again where needed
	@test -d artifacts/benchmark || { echo "nothing to compare yet: make run"; exit 2; }
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m dvc repro --quiet --single-item compare
	@cat artifacts/compare/table.md

test: $(READY)           ## the test suite
	$(BIN)/python -m pytest

check: $(READY)          ## lint and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

ui: $(READY)             ## the MLflow UI, http://127.0.0.1:5000
	$(BIN)/python -m flows.ui

serve: $(READY)          ## Prefect server, worker and schedules, http://127.0.0.1:4200
	@$(BIN)/python -m flows.serve

bench: $(READY)          ## bits recounted from bytes, speed of the packed models, allocators at equal bits
	$(BIN)/python -m benchmarks bits
	$(BIN)/python -m benchmarks decode
	$(BIN)/python -m benchmarks allocation

clean:                   ## artifacts and resume state; not the environment, not mlruns/, not DVC's cache
	rm -rf artifacts .state

$(READY): pyproject.toml constraints.txt
	@echo "setting up .venv: a few minutes, once"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' || { echo "windquant needs Python 3.11; make PYTHON=<path to it>"; exit 2; }
	@$(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install --disable-pip-version-check torch==2.13.0
	@$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@
