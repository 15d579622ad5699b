# The commands of this repository. `make` alone lists them.
SHELL := /bin/bash
.DEFAULT_GOAL := help
.NOTPARALLEL:

VARIANT ?= cpu
PY := .venv/bin/python
SIZE ?=
DEMO_TIMEOUT_S ?= 7200
NAME ?=
PYTEST_ARGS ?=
PYTHON ?= python3.11

# The demo counts its time from here, set-up included; its run is found again by its name.
begun := $(shell date -u +%Y-%m-%dT%H:%M:%SZ)
demo_run := $(shell date +demo-%d%H%M%S)
DSPARK := .venv/bin/dspark
demo_options = --run-name $(demo_run) --timeout-s $(DEMO_TIMEOUT_S)
# The report is shown whatever came of the run. Its path is the last line of a run that ended well; the last lines of any
# other say what failed, what serves now and what to do. Exit code: 0 promoted, or the release in service stays because
# the new one is not as good; 1 the run failed; 4 gate failed; 5 gate inconclusive; 6 canary rolled back.
show_report = where() { $(PY) -m components.services.where "$$1"; }; \
	printf 'Prefect UI  %s\nMLflow UI   %s\n\n' "$$(where prefect_api_url | sed 's|/api$$||')" "$$(where mlflow_url)"; \
	$(DSPARK) report

.PHONY: help setup up down demo demo-target-change test test-long check docs docs-settings bench clean

help: ## list the commands
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(firstword $(MAKEFILE_LIST)) | expand -t 22

setup: ## make .venv and install everything, pinned (VARIANT=cpu or cuda)
	@.ci/setup $(VARIANT)

up: setup ## start Prefect, MLflow, Mooncake, HAProxy and the deployments
	@$(DSPARK) up

down: ## end everything that `make up` started
	@if [ -x $(DSPARK) ]; then $(DSPARK) down; else echo "nothing is set up, so nothing is up"; fi

demo: up ## the whole loop on the demo target, live (SIZE=full for the longer one)
	@code=0; $(DSPARK) run drafter-lifecycle demo --target source --param 'begun_at="$(begun)"' \
		$(if $(SIZE),--size $(SIZE)) $(demo_options) || code=$$?; \
		$(show_report) --run $(demo_run) --followed $$code

demo-target-change: up ## the target changes twice; the drafter is re-measured, re-bound or retrained
	@code=0; $(DSPARK) run demo-target-change demo $(demo_options) || code=$$?; \
		$(show_report) --run $(demo_run) --followed $$code

test: setup check ## checks, then unit, integration and end-to-end tests without the long ones, on free ports
	@$(PY) -m pytest -m 'not long' $(PYTEST_ARGS) tests/unit tests/integration tests/e2e

test-long: setup check ## checks, then every test: faults, kills, several processes, target changes too
	@$(PY) -m pytest $(PYTEST_ARGS) tests/unit tests/integration tests/e2e

check: setup ## ruff, strict typing, import contracts, documents: links, names, settings
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .
	@$(PY) -m mypy
	@.venv/bin/lint-imports
	@$(PY) -m pytest -q --noconftest tests/unit/docs
	@$(PY) -m components.reporting.settings_document --check

docs-settings: setup ## write docs/settings.md from the models of components/settings
	@$(PY) -m components.reporting.settings_document

bench: setup ## one benchmark of tests/benchmarks (NAME=...), or all
	@$(PY) -m tests.benchmarks.run $(NAME)

docs: .venv-docs/done ## the documents as a site: site/index.html
	@NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --quiet && echo "site/index.html"

.venv-docs/done: requirements-docs.txt
	@rm -rf .venv-docs && $(PYTHON) -m venv .venv-docs
	@.venv-docs/bin/python -m pip install -qq --no-deps --disable-pip-version-check -r requirements-docs.txt
	@touch $@

clean: down ## end the services; remove .venv, state and caches
	@rm -rf .venv .venv-docs site .dspark build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
