# make up      installs what is needed, makes the tiny model, starts examples/tiny-cpu.yaml (Ctrl-C stops it)
# make demo    shows in a minute what Sluice does
# make test    runs every check that CI runs
# make down    stops what `make up` or `make demo` left running
# make lock    resolves the dependencies anew after an edit of pyproject.toml
# make reference writes docs/reference/crd.md and cli.md after an edit of crds/ or of commands
# make docs    builds the docs site into build/docs; a dead link is an error
# make format  formats the code
# make soak    kills routers 900 times under streams that resume (hours; ARGS="--kills 40" for less)
# make e2e-k8s runs the tests on a real Kubernetes, which it builds and starts (Go, root; minutes the first time)
# make kubernetes builds that Kubernetes, if it is not built yet (ten minutes)
# make images-check builds the images of the Dockerfiles, and runs them there (30 GB of disk, a quarter of an hour)
# make autoscalers-check builds KEDA and prometheus-adapter, and has them scale a cluster there (half an hour)
# make compatibility runs the tests on other Pythons and Kubernetes versions, then the two above (hours; ARGS="python")
# make release-check makes the files of a release, and publishes them at a registry on this machine (helm, Go)
# make bench   runs the benchmarks
# make bench-paper writes docs/measurements/papers.md anew: papers reproduced in the simulator
# make mutation changes what the programs decide, bit by bit: does a test notice? ARGS="operator" for one part
# make clean   removes all of the above; models and volumes stay
#
# Needs Python 3.11 to 3.14, make and a C compiler. Every step leaves a stamp: a second run starts in seconds.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
MAKEFLAGS += --no-builtin-rules --no-print-directory

PYTHON ?= python3
MANIFEST ?= examples/tiny-cpu.yaml
ARGS ?=
# With ARGS="--only ..." name the paper.
PAPERS ?= $(basename $(notdir $(wildcard benchmarks/papers/*.toml)))

BIN := .venv/bin
STAMPS := .venv/stamps
MODEL := .sluice/volumes/models/tiny/sluice-recipe.json
# GPUs get the stock engine, other machines the build for the CPU.
ENGINE := $(if $(shell nvidia-smi -L 2>/dev/null),engine,engine-cpu)
# The wheel as images install it, with core and router compiled (hatch_build.py); tests and benchmarks run on it.
COMPILED := build/compiled/stamp
SOURCES := $(shell find core protos router engine_image operator cli -path '*/sluice*' \( -name '*.py' -o -name '*.jinja' \))
# Bytecode is compiled at the installation: where PYTHONDONTWRITEBYTECODE is set, importing vLLM would cost 25 s each time.
INSTALL := $(BIN)/uv pip install --quiet --python $(BIN)/python --compile-bytecode

.PHONY: help up demo test soak e2e-k8s kubernetes images-check autoscalers-check compatibility release-check down lock reference docs format bench bench-paper mutation clean dev install model
help:
	@sed -n 's/^# //p' Makefile | head -19

up: install model
	@exec $(BIN)/sluice up $(MANIFEST) $(ARGS)

demo: install model
	@exec $(BIN)/sluice demo $(ARGS)

test: $(STAMPS)/dev model
	@exec $(BIN)/python .ci/checks.py $(ARGS)

soak: $(STAMPS)/dev $(COMPILED) model
	@exec $(BIN)/python e2e/soak_routers.py $(ARGS)

e2e-k8s: $(STAMPS)/dev $(COMPILED) model
	@PYTHONPATH=e2e/kube:.ci exec $(BIN)/python -m testbed test $(ARGS)

kubernetes: $(STAMPS)/dev
	@PYTHONPATH=e2e/kube:.ci exec $(BIN)/python -m testbed build

images-check: $(STAMPS)/dev model
	@PYTHONPATH=e2e/kube:.ci exec $(BIN)/python -m testbed test -s e2e/kube/test_images.py $(ARGS)

autoscalers-check: $(STAMPS)/dev $(COMPILED) model
	@PYTHONPATH=e2e/kube:.ci exec $(BIN)/python -m testbed test -s e2e/kube/test_autoscalers.py $(ARGS)

compatibility: $(STAMPS)/dev $(COMPILED) model
	@exec $(BIN)/python .ci/compatibility.py $(ARGS)

release-check: $(STAMPS)/dev
	@exec $(BIN)/python .ci/release_files.py check $(ARGS)

down:
	@if [ -x $(BIN)/sluice ]; then $(BIN)/sluice down --all; else echo "nothing runs"; fi

install: $(STAMPS)/$(ENGINE)

dev: $(STAMPS)/dev

model: $(MODEL)

$(MODEL): examples/tiny_model.py | $(STAMPS)/$(ENGINE)
	@$(BIN)/python examples/tiny_model.py $(@D)
	@touch $@

$(BIN)/python:
	@$(PYTHON) -c 'import sys; ok = (3, 11) <= sys.version_info[:2] <= (3, 14); sys.exit(None if ok else f"$(PYTHON) is Python {sys.version.split()[0]}, Sluice needs 3.11 to 3.14: make PYTHON=python3.12 ...")'
	@echo "making .venv"
	@$(PYTHON) -m venv .venv

$(STAMPS)/uv: requirements/uv.txt | $(BIN)/python
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements/uv.txt
	@mkdir -p $(@D) && touch $@

$(STAMPS)/$(ENGINE): $(STAMPS)/uv requirements/router.txt requirements/operator.txt requirements/cli.txt requirements/$(ENGINE).txt
	@echo "installing vLLM and the rest: about 3 GB to fetch once, 1 to 10 minutes"
	@$(INSTALL) --no-deps -r requirements/router.txt -r requirements/operator.txt -r requirements/cli.txt -r requirements/$(ENGINE).txt
	@$(INSTALL) --no-deps --editable .
	@touch $@

$(STAMPS)/dev: $(STAMPS)/$(ENGINE) requirements/dev.txt
	@$(INSTALL) --no-deps -r requirements/dev.txt
	@touch $@

$(COMPILED): hatch_build.py pyproject.toml $(SOURCES) | $(STAMPS)/uv
	@echo "building the wheel: two minutes"
	@rm -rf build/wheel build/compiled
	@$(BIN)/uv build --quiet --python $(BIN)/python --wheel --out-dir build/wheel
	@$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps --target build/compiled build/wheel/*.whl
	@touch $@

lock: $(STAMPS)/dev
	@PATH=$(CURDIR)/$(BIN):$$PATH $(BIN)/python requirements/lock.py write

reference: $(STAMPS)/dev
	@$(BIN)/python crds/reference.py write
	@$(BIN)/python docs/cli_reference.py write

docs: $(STAMPS)/dev
	@$(BIN)/python -m sphinx -q -E -W --keep-going -b html docs build/docs
	@echo "build/docs/index.html"

format: $(STAMPS)/dev
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

bench-paper: $(STAMPS)/dev $(COMPILED)
	@for paper in $(PAPERS); do \
		PYTHONPATH=build/compiled $(BIN)/python -m benchmarks.papers.run $$paper --document docs/measurements/papers.md $(ARGS); done

# The one on prefixes has a placement of its own, which cannot extend a compiled one.
bench: install model $(COMPILED)
	@for program in $(filter-out benchmarks/papers/run.py,$(wildcard benchmarks/*/run.py)); do \
		case $$program in benchmarks/prefixes/*) path=.;; *) path=build/compiled:.;; esac; \
		echo "== $$program" && PYTHONPATH=$$path $(BIN)/python $$program $(ARGS); done

mutation: $(STAMPS)/dev
	@exec $(BIN)/python -m benchmarks.mutation.mutate $(ARGS)

clean: down
	@rm -rf .venv build .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache .sluice/clusters
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
