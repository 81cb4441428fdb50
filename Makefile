# `make demo` and `make test` work on a bare checkout: what they need is installed into .venv first.
# `make test` runs the fast tests, `make test-slow` the others, `make test-all` both.

PYTHON ?= python3
# Each version of torchvision fits one version of torch, from the same index. To spare yourself several GB of CUDA packages:
#   make venv TORCH="torch==2.13.0 torchvision==0.28.0 --index-url https://download.pytorch.org/whl/cpu"
TORCH ?= torch==2.13.0 torchvision==0.28.0
# Passed on to the example or to pytest, for instance: make test ARGS="tests/test_boundaries.py -x"
ARGS ?=

BIN := .venv/bin
DEMO_INSTALLED := .venv/.demo-installed
INSTALLED := .venv/.installed
PYTEST := $(BIN)/python -m pytest --numprocesses auto --maxprocesses 8 --dist worksteal
# The slow tests wait half of their time, for Ray and for servers: three of them share two processors.
CROWDED := --numprocesses $$((($$(nproc) * 3 + 1) / 2))
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: venv demo test test-slow test-all lint docs coverage clean

venv: $(INSTALLED)

demo: $(DEMO_INSTALLED)
	$(BIN)/python examples/quickstart.py $(ARGS)

test: $(INSTALLED)
	$(PYTEST) -m "not slow" $(ARGS)

test-slow: $(INSTALLED)
	$(PYTEST) $(CROWDED) -m slow $(ARGS)

test-all: $(INSTALLED)
	$(PYTEST) $(CROWDED) $(ARGS)

# Every model of the coverage list, in some minutes; `make test-slow` takes a sample of 30.
coverage: $(INSTALLED)
	$(BIN)/python -m pytest tests/test_coverage.py --all-models $(ARGS)

lint: $(INSTALLED)
	$(BIN)/python -m ruff check
	$(BIN)/python -m ruff format --check
	$(BIN)/python -m mypy
	$(BIN)/python -m mypy --config-file optunahub/mypy.ini optunahub/package

# The documentation site, in out/site. A link that leads nowhere and a page that is not in docs/_toc.yml are errors.
docs: $(INSTALLED)
	$(BIN)/python -m pip install --quiet --group docs
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --fresh-env --quiet -c docs -d out/doctrees . out/site
	@echo "Open out/site/index.html"

# Leaves .venv alone; remove it by hand to start afresh.
clean:
	rm -rf build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -path ./.venv -prune -o -name __pycache__ -type d -exec rm -rf {} +

# torch goes first: the looser "torch>=2.6" of pyproject.toml would take the newest. The demo needs half of what the tests need,
# and the digits of scikit-learn.
$(DEMO_INSTALLED): pyproject.toml | $(BIN)/pip
	$(BIN)/python -m pip install --quiet "pip>=25.1"
	$(BIN)/python -m pip install --quiet $(TORCH)
	$(BIN)/python -m pip install --quiet --editable ".[optuna,plot]" "scikit-learn>=1.5"
	@touch $@

# Last comes what lets a torchvision from PyPI be imported beside a CPU build of torch; beside any other torch it does nothing.
SHIM := $(wildcard tools/torchvision_beside_cpu_torch.*)

$(INSTALLED): $(DEMO_INSTALLED) models/pyproject.toml $(SHIM)
	$(BIN)/python -m pip install --quiet --editable ".[optuna,ray,postgres,export,plot]" --editable ./models --group dev --group zoo
	cp $(SHIM) "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
	@touch $@

# Debian without python3-venv has no ensurepip; its own pip can then put pip into the environment.
$(BIN)/pip:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' || { \
	    echo "PerfGuard needs Python 3.10 to 3.13, but $(PYTHON) is another or missing. Name one: make PYTHON=python3.11" >&2; exit 1; }
	@if $(PYTHON) -c 'import ensurepip' 2>/dev/null; then \
	    $(PYTHON) -m venv .venv; \
	else \
	    $(PYTHON) -m venv --without-pip .venv && $(PYTHON) -m pip --python $(BIN)/python install --quiet pip; \
	fi || { echo "Cannot create .venv with $(PYTHON). On Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; }
