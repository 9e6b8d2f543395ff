# Every target makes .venv first, once: it is made again only when pyproject.toml or constraints.txt changes.
#   PYTHON=python3.12 make test    another interpreter
#   make test ARGS="-k gae -x"     more arguments for pytest; ARGS="-n 0" runs them in one process

SHELL := bash
.DEFAULT_GOAL := help
.PHONY: help setup demo test test-long test-vllm lint docs clean-env

PYTHON ?=
ARGS ?=
PYTHONS := $(or $(PYTHON),python3.11 python3.12 python3.13 python3)
VENV := .venv
READY := $(VENV)/ready

help:
	@echo "make demo       the whole recipe on a small world: runs/demo, minutes on a laptop"
	@echo "make test       the tests, without the long ones"
	@echo "make test-long  the long ones"
	@echo "make test-vllm  those with a real vLLM, on the CPU, in an environment of its own: .venv-vllm (3 GB)"
	@echo "make lint       ruff and mypy"
	@echo "make docs       the documentation as a site: site/index.html"
	@echo "make setup      only $(VENV), which every target makes if it is missing"
	@echo "make clean-env  remove $(VENV)"
	@echo "PYTHON=... chooses the interpreter (3.11 to 3.13), ARGS=... goes to pytest."

demo: $(READY)
	$(VENV)/bin/rlhf pipeline experiment=gold run=demo

# Three processes of one thread each, for two cores: a quarter of the time a test waits. Each takes a file at a time, the longest first.
# Bytecode is kept, whatever the environment says: some hundred processes import the package.
test: $(READY)
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder $(ARGS)

test-long: $(READY)
	$(VENV)/bin/python -m pytest -m long --timeout 3600 $(ARGS)

# vLLM pins other versions than the project does, so its packages are installed as listed, without resolving them.
test-vllm: $(VENV)-vllm/ready
	OMP_NUM_THREADS=1 $(VENV)-vllm/bin/python -m pytest -m vllm tests/vllm -n 0 --timeout 900 $(ARGS)

$(VENV)-vllm/ready: $(READY) constraints-vllm.txt
	@echo "Setting up $(VENV)-vllm: some minutes, once"
	@$(VENV)/bin/python -c 'import sys; sys.exit("make: vLLM\x27s CPU build is tested with Python 3.11" if sys.version_info[:2] != (3, 11) else 0)'
	$(VENV)/bin/python -m venv --clear $(VENV)-vllm
	$(VENV)-vllm/bin/python -m pip install -q --progress-bar off --no-deps -r constraints-vllm.txt -e .
	touch $(VENV)-vllm/ready

lint: $(READY)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build

setup: $(READY)

clean-env:
	rm -rf $(VENV) $(VENV)-vllm

# The stamp goes first and comes back last, so that an interrupted set-up does not count; without it .venv starts empty.
$(READY): pyproject.toml constraints.txt
	@set -euo pipefail; \
	export PIP_DISABLE_PIP_VERSION_CHECK=1; \
	found=; \
	for python in $(PYTHONS); do \
	  if "$$python" -c 'import sys, ensurepip, venv; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null; \
	  then found=$$python; break; fi; \
	done; \
	if [ -z "$$found" ]; then \
	  echo "make: no Python 3.11, 3.12 or 3.13 with venv among: $(PYTHONS): install one, or name it: make PYTHON=/path/to/python" >&2; \
	  exit 1; \
	fi; \
	if [ ! -f $(READY) ]; then \
	  echo "Setting up $(VENV) with $$("$$found" --version): some minutes, once"; \
	  "$$found" -m venv --clear $(VENV); \
	else \
	  echo "Updating $(VENV)"; \
	  rm $(READY); \
	fi; \
	$(VENV)/bin/python -m pip install --progress-bar off -c constraints.txt -e ".[dev]" | while IFS= read -r line; do \
	  case "$$line" in \
	    *Downloading*"("[0-9][0-9]*" MB)" | *"Using cached"*"("[0-9][0-9]*" MB)") echo "  $${line#"$${line%%[![:space:]]*}"}" ;; \
	    "Installing collected"*) echo "  Installing" ;; \
	  esac; \
	done; \
	touch $(READY); \
	echo "$(VENV) is ready"
