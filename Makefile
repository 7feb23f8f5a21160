# Everything happens inside the checkout: the environment in .venv, results in runs/, the wheel in dist/.
# Paths are relative and programs run as `.venv/bin/python -m ...`, so the checkout may lie anywhere, under any name.

PYTHON ?=
PYTEST_ARGS ?=

python := .venv/bin/python
pip_install := $(python) -m pip -qq --disable-pip-version-check install -c constraints.txt
pythons := $(if $(PYTHON),"$(PYTHON)",python3.11 python3 python3.12 python3.13)

# The environment in which pip builds a package does not see -c: these pin it too (the second, from pip 25.3 on).
export PIP_CONSTRAINT := constraints.txt
export PIP_BUILD_CONSTRAINT := constraints.txt
export PIP_USER := 0

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help demo test lint bench docs wheel release clean FORCE

help: ## Say what can be made
	@echo "make TARGET, where TARGET is one of:"
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/  \1	\2/p' Makefile
	@echo 'PYTHON=/path/to/python3.11 chooses the Python of a new .venv; PYTEST_ARGS="-m slow" is passed to pytest.'

demo: .venv/installed ## Install engram into .venv and learn ten digits, two at a time, by three methods (runs/demo)
	@echo "==> python examples/demo.py"
	@$(python) examples/demo.py

test: lint ## Check everything: lint, types, imports between rooms, tests
	@echo "==> Running the tests"
	@$(python) -m pytest -n auto $(PYTEST_ARGS)

lint: .venv/installed-dev ## Check style, types and the imports between rooms
	@echo "==> Checking style (ruff)"
	@$(python) -m ruff check .
	@$(python) -m ruff format --check .
	@echo "==> Checking types (mypy)"
	@$(python) -m mypy
	@echo "==> Checking imports between rooms (import-linter)"
	@$(python) .venv/bin/lint-imports --no-logo

bench: .venv/installed-dev ## Measure speed beside the alternatives, in at most fifteen minutes (the result: benchmarks/RESULTS.md)
	@echo "==> Running the benchmarks of benchmarks/speed"
	@$(python) benchmarks/speed/all.py

docs: .venv/installed-dev ## Build the site into site/ and check its links
	@echo "==> Building the site into site/"
	@$(python) -m sphinx -q -W --keep-going -j auto -d site/.doctrees -b html docs site
	@$(python) docs/check_site.py site

wheel: .venv/installed-dev ## Build the wheel into dist/
	@echo "==> Building the wheel into dist/"
	@$(python) -m build --wheel --no-isolation --outdir dist .

release: .venv/installed-dev ## Build and check the sdist and the wheel, and write the changelog's section
	@.ci/release

clean: ## Remove the environment, builds and caches; runs/ stays
	@echo "==> Removing .venv, dist, build and caches (runs/ stays)"
	@rm -rf .venv dist build site docs/generated .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	@find src tests -name __pycache__ -prune -exec rm -rf {} +

# The environment. It is made anew when its Python no longer runs or when the checkout has moved: its files hold paths.
.venv/checkout: FORCE
	@here=$$(pwd -P); without_venv=; \
	if $(python) -m pip --version >/dev/null 2>&1 && [ "$$(cat $@ 2>/dev/null || echo "$$here")" = "$$here" ]; then \
	    [ -f $@ ] || echo "$$here" > $@; \
	    exit 0; \
	fi; \
	for candidate in $(pythons); do \
	    if ! "$$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	        continue; \
	    elif ! "$$candidate" -c 'import ensurepip, venv' 2>/dev/null; then \
	        without_venv=$$candidate; \
	    else \
	        echo "==> Making the environment .venv with $$candidate"; \
	        rm -rf .venv && "$$candidate" -m venv .venv && echo "$$here" > $@; \
	        exit; \
	    fi; \
	done; \
	if [ -n "$$without_venv" ]; then \
	    echo "$$without_venv cannot make environments. Install its venv (Debian, Ubuntu: apt install python3-venv)." >&2; \
	else \
	    echo 'No Python 3.11 or newer was found. Tried: $(pythons)' >&2; \
	fi; \
	echo "A Python can be named: make $(or $(MAKECMDGOALS),demo) PYTHON=/path/to/python3.11" >&2; \
	exit 1

# pip writes INSTALLER at the very end. A package without it was cut short: forgotten here, so that pip installs it again.
forget_cut_short = for package in .venv/lib/python*/site-packages/*.dist-info; do \
	[ ! -d "$$package" ] || [ -f "$$package/INSTALLER" ] || rm -rf "$$package"; done

.venv/installed: .venv/checkout pyproject.toml constraints.txt
	@echo "==> Installing engram into .venv (a minute or two the first time)"
	@$(forget_cut_short)
	@$(pip_install) -e .
	@touch $@

.venv/installed-dev: .venv/checkout pyproject.toml constraints.txt
	@echo "==> Installing engram and the tools that check it into .venv (a minute or two the first time)"
	@$(forget_cut_short)
	@$(pip_install) -e '.[dev]'
	@touch .venv/installed $@
