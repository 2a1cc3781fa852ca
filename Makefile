# `make demo` shows the agent learn; `make test` runs the tests. Both make .venv first where it is missing.
#   make demo PYTHON=python3.12     with that Python          make test PYTEST_ARGS="-k replay -x"     options for pytest
#   make demo VENV=/path/to/venv    in that environment: a torch >= 2.10 that is there already is kept
.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help demo test check mutate scores table wheel

VENV ?= .venv
PY := $(VENV)/bin/python
PYTEST_ARGS ?=
# The first Python >= 3.11 on the path; looked for only when a virtual environment has to be made.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 python; do \
	"$$p" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && { echo "$$p"; break; }; done)

help:
	@echo "make demo     train a small agent in about five minutes; the last lines say where its learning curve and video are"
	@echo "make test     all tests but those that need a GPU"
	@echo "make check    ruff and mypy"
	@echo "make mutate   break the code in known ways: do the tests notice?"
	@echo "make scores   play the bundled environments with their reference policies"
	@echo "make table    the README's table, made from experiments/ and results/"
	@echo "make wheel    dist/dae_rl-*.whl"

demo: $(VENV)/.installed-demo
	@$(VENV)/bin/dae train --preset quickstart

# Two workers of one thread each, for two cores.
test: $(VENV)/.installed-dev
	@OMP_NUM_THREADS=1 $(PY) -m pytest -n 2 --dist worksteal -m "not gpu" --durations 10 $(PYTEST_ARGS)

check: $(VENV)/.installed-dev
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .
	@$(PY) -m mypy

mutate: $(VENV)/.installed-dev
	@$(PY) tests/mutate.py

scores: $(VENV)/.installed-dev
	@$(PY) -m dae.envs.scores

table: $(VENV)/.installed-dev
	@$(PY) -m dae.study.table results/laptop --readme README.md --pictures docs/img

wheel: $(VENV)/.installed-dev
	@rm -f dist/dae_rl-*.whl
	@$(PY) -m build --wheel --outdir dist . >$(VENV)/build.log 2>&1 || { cat $(VENV)/build.log >&2; exit 1; }
	@ls dist/dae_rl-*.whl

# Prints the pins; without those of torch where a torch is installed that will do.
define PINS
import importlib.metadata, re
try:
    kept = tuple(int(n) for n in re.findall(r"\d+", importlib.metadata.version("torch"))[:2]) >= (2, 10)
except importlib.metadata.PackageNotFoundError:
    kept = False
for line in open("constraints.txt"):
    if not (kept and re.match(r"(torch|triton|setuptools)==", line)):
        print(line, end="")
endef
export PINS

$(VENV)/.installed-%: pyproject.toml constraints.txt | $(PY)
	@$(PY) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
		{ echo "error: $(VENV) has no working Python 3.11 or newer; remove it, or name another: make VENV=..." >&2; exit 1; }
	@$(PY) -m pip --version >/dev/null 2>&1 || $(PY) -m ensurepip >/dev/null
	@$(PY) -c "$$PINS" >$(VENV)/constraints.txt
	@echo "Installing dae-rl[$*] into $(VENV) (its log: $(VENV)/install.log) ..."
	@$(PY) -m pip install --progress-bar off --editable '.[$*]' --constraint $(VENV)/constraints.txt >$(VENV)/install.log 2>&1 || \
		{ tail -n 20 $(VENV)/install.log >&2; echo "error: pip could not install dae-rl[$*]" >&2; exit 1; }
	@touch $@

$(PY):
	@test -n "$(PYTHON)" || { echo "error: Python 3.11 or newer is needed; install it, or name it: make PYTHON=/path/to/python3" >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "error: $(PYTHON) is not Python 3.11 or newer" >&2; exit 1; }
	@"$(PYTHON)" -c 'import ensurepip, venv' 2>/dev/null || \
		{ echo "error: $(PYTHON) lacks venv; on Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }
	@"$(PYTHON)" -m venv $(VENV)
