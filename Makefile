# Each target sets up what it needs: .venv, and the model in models/ or $LOGRA_MODELS. A second call finds both there.

STAMP := .venv/.complete
ENGINE := .venv-engine/.complete
USABLE := import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))
LOGRA := .venv/bin/logra

export LOGRA_MODELS ?= models
# The model is a local folder: nothing waits for a network.
export HF_HUB_OFFLINE := 1
export TOKENIZERS_PARALLELISM := false

.PHONY: help env engine data model peers demo demo-control demo-dense demo-engine bench bench-phases claims mutants notebooks notebooks-rewrite test test-full lint format clean FORCE

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-13s %s\n", $$1, $$2}' Makefile

env: $(STAMP) ## the environment, .venv; PYTHON=… chooses another interpreter for it

# Paths of this folder stand in the environment, so that of a moved or copied folder is installed anew.
ifneq ($(shell cat $(STAMP) 2>/dev/null),$(CURDIR))
$(STAMP): FORCE
endif

ifneq ($(shell cat $(ENGINE) 2>/dev/null),$(CURDIR))
$(ENGINE): FORCE
endif

engine: env $(ENGINE) ## the environment of vLLM's engines on a CPU, .venv-engine; about three minutes and 3 GB

# Apart from .venv: vLLM pins some hundred packages of its own, and loads this project there as a plugin.
$(ENGINE): constraints-engine.txt pyproject.toml
	@rm -rf .venv-engine && .venv/bin/python -m venv .venv-engine
	@.venv-engine/bin/python -m pip install --disable-pip-version-check --no-deps --requirement constraints-engine.txt
	@.venv-engine/bin/python -m pip install --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@pwd -P > $(ENGINE)

# After an interruption half a package may lie there that pip takes for a whole one: start from nothing.
$(STAMP): pyproject.toml constraints.txt
	@if [ -e .venv/.unfinished ] || ! .venv/bin/python -c 'import pip; $(USABLE)' 2>/dev/null; then \
	  for python in $(if $(PYTHON),"$(PYTHON)",python3.11 python3.12 python3.13 python3.14 python3) none; do \
	    "$$python" -c '$(USABLE)' 2>/dev/null && break; \
	  done; \
	  if [ "$$python" = none ]; then \
	    echo "LoGRA needs Python 3.11 or newer with its venv module; here $(or $(PYTHON),python3) is" \
	      "$$("$(or $(PYTHON),python3)" --version 2>/dev/null || echo missing)." >&2; \
	    echo "Install it (Debian, Ubuntu: apt-get install python3 python3-venv; macOS: brew install python@3.13)," >&2; \
	    echo "or name one: make env PYTHON=/path/to/python3" >&2; \
	    exit 1; \
	  fi; \
	  echo "Making .venv with $$("$$python" --version)"; \
	  rm -rf .venv && mkdir .venv && touch .venv/.unfinished && "$$python" -m venv .venv; \
	fi
	@rm -f $(STAMP) && touch .venv/.unfinished
	@.venv/bin/python -m pip install --disable-pip-version-check --constraint constraints.txt --editable '.[dev,notebooks]'
	@rm .venv/.unfinished && pwd -P > $(STAMP)

# Apart from env, as one of its packages (pycosat) comes as C source.
data: env .venv/.data ## what reads the paper's data sets, and reasoning-gym; needs a C compiler

.venv/.data: $(STAMP)
	@.venv/bin/python -m pip install --disable-pip-version-check --constraint constraints.txt --editable '.[data]'
	@touch $@

peers: env .venv-peers/.complete ## GaLore and APOLLO by their authors, for the benchmarks

.venv-peers/.complete: constraints-peers.txt
	@rm -rf .venv-peers
	@.venv/bin/python -m pip install --disable-pip-version-check --no-deps --target .venv-peers --requirement $<
	@touch $@

model: env ## the pretrained model, SmolLM2-135M-Instruct
	@[ -f "$$LOGRA_MODELS/smollm2/config.json" ] || $(LOGRA) model smollm2 "$$LOGRA_MODELS/smollm2"

# runs/demo is the newest: an older one takes the first free name of runs/demo-1, runs/demo-2, …
define keep_older
	@if [ -e $(1) ]; then \
	  n=1; while [ -e $(1)-$$n ]; do n=$$((n + 1)); done; \
	  mv $(1) $(1)-$$n && echo "$(1) was there already; it is kept as $(1)-$$n"; \
	fi
endef

demo: model ## RL on the pretrained model, about seven minutes on two cores, and its report
	$(call keep_older,runs/demo)
	@$(LOGRA) train smollm2-demo

demo-dense: model ## the same by dense Adam
	$(call keep_older,runs/demo-dense)
	@$(LOGRA) train smollm2-demo-dense

demo-engine: model engine ## the same by LoGRA, with responses from a vLLM engine that follows it
	$(call keep_older,runs/demo-engine)
	@$(LOGRA) launch smollm2-demo rollout.backend=vllm engine.max_model_len=256 run=runs/demo-engine

demo-control: model ## a nominal step that is too large, without step control and with it
	$(call keep_older,runs/demo-control)
	$(call keep_older,runs/demo-controlled)
	@$(LOGRA) train smollm2-demo-control
	@$(LOGRA) train smollm2-demo-control control.enabled=true run=runs/demo-controlled

bench-phases: model ## seconds and peak memory of the demo's update by phase, LoGRA beside dense Adam and LoRA
	@$(LOGRA) bench phases smollm2-demo --updates 2

bench: model peers ## a training step of LoGRA beside dense Adam, LoRA, GaLore and APOLLO; about ten minutes
	@$(LOGRA) bench step

claims: model data ## the whole ledger, and from it the README's table; about 25 minutes
	@.venv/bin/python -m validation --json validation/ledger.json --readme README.md

mutants: model data ## break every formula of logra_ref in turn, and show what notices it; about ten minutes
	@.venv/bin/python -m validation.mutants --readme README.md

notebooks: model ## run every notebook and compare every cell with what is stored
	@.venv/bin/python -m pytest --nbval --nbval-current-env notebooks

notebooks-rewrite: model ## run every notebook and store what comes out, after a change that is meant
	@.venv/bin/jupyter execute --inplace notebooks/*.ipynb notebooks/solutions/*.ipynb

test: lint model data engine ## what CI runs: lint, all tests with the quick ledger and a real engine, the notebooks
	@.venv/bin/python -m pytest
	@$(MAKE) --no-print-directory notebooks

test-full: lint model data engine ## the same with many more random examples, all mutants, killed runs and the full ledger
	@.venv/bin/python -m pytest --hypothesis-profile=full
	@.venv/bin/python -m tests.ranks.kill_anytime 20
	@$(MAKE) --no-print-directory notebooks mutants
	@.venv/bin/python -m validation

lint: env ## ruff: format and rules
	@.venv/bin/ruff format --check .
	@.venv/bin/ruff check .

format: env ## put right what ruff can
	@.venv/bin/ruff format .
	@.venv/bin/ruff check --fix .

clean: ## remove .venv and caches; runs/ and models/ stay
	@rm -rf .venv .venv-engine .venv-peers .pytest_cache .ruff_cache .hypothesis build *.egg-info
	@find logra_ref scaled validation tests examples -name __pycache__ -prune -exec rm -rf {} +
	@echo "Kept: runs/ and models/"
