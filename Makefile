# make bench   set up, then time this machine's adapters:  make bench BENCH_ARGS="--device cpu"
# make test    set up with the test extras, then pytest:   make test TEST_ARGS="-k planning"
# PYTHON names the interpreter to build the environment from, VENV where it goes.

PYTHON ?= python3
VENV ?= .venv
BENCH_ARGS ?=
TEST_ARGS ?=
export PYTHON

# A stamp, not the environment itself, so that what changes the set-up, and only that, runs it again.
installed := $(VENV)/.installed
installed_test := $(VENV)/.installed-test
setup_inputs := pyproject.toml scripts/setup.sh scripts/apt-install.sh

.PHONY: bench test lint clean

bench: $(installed)
	$(VENV)/bin/cortiq-o1 bench $(BENCH_ARGS)

test: $(installed_test)
	@scripts/ensure-vulkan.sh $(VENV)
	$(VENV)/bin/python -m pytest -n auto --maxprocesses 4 --dist loadfile $(TEST_ARGS)

lint: $(installed_test)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

clean:
	rm -rf $(VENV) build dist .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# One recipe each, and the fuller set-up serves as the plain one too.
$(installed): $(setup_inputs)
	scripts/setup.sh $(VENV)
	@touch $@

$(installed_test): $(setup_inputs)
	scripts/setup.sh $(VENV) test
	@touch $(installed) $@
