PYTHON ?= python3
VENV := .venv
WHAT := -e ".[experiments,dev,docs]"
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DEMO_STAMP := $(VENV)/.installed-for-demo

TORCH := torch==2.13.0
# Where no GPU is, take torch's CPU build: PyPI's build for Linux brings the CUDA packages along.
# If that index cannot be reached, pip warns and uses the index of the machine.
CPU_INDEX := --extra-index-url https://download.pytorch.org/whl/cpu
TORCH_INDEX ?= $(shell nvidia-smi -L >/dev/null 2>&1 || echo "$(CPU_INDEX)")

# A worker for each processor; at most 8, since each holds about a gigabyte.
PYTEST := $(BIN)/python -m pytest -n logical --maxprocesses 8 --dist worksteal

CSRC = $(shell find csrc tests -name '*.h' -o -name '*.cpp' -o -name '*.cu')

.PHONY: help install demo test test-long mutants attack scatter lint format docs docs-version numbers wheel versions clean

help:
	@echo "make install      make .venv with torch, the library and the tools"
	@echo "make demo         train GAT with compressed contexts beside fp32"
	@echo "make test         run the tests, before a commit"
	@echo "make test-long    run the others, which take longer"
	@echo "make mutants      plant faults one by one; the tests must find each"
	@echo "make attack       20,000 random programs beside stock; PROGRAMS=1000 SEED=7 for others"
	@echo "make scatter      test with torch-scatter and torch-sparse, built from their sources"
	@echo "make lint         ruff, mypy, clang-format, codespell"
	@echo "make format       let ruff and clang-format rewrite the sources"
	@echo "make docs         build the documentation in site/; a broken link is an error"
	@echo "make docs-version commit the documentation of this version to the branch gh-pages"
	@echo "make numbers      measure again what an older library gave; ARGS=peers for some"
	@echo "make wheel        build dist/*.whl with compiled CPU kernels"
	@echo "make versions     train and test the wheel with each torch and PyG; ARGS=\"--torch 2.13.0\" for some"
	@echo "make clean        remove .venv and what was built"

install: $(STAMP)

# The stamp is written last: an installation that broke off is taken up again. torch comes without
# its own requirements, so that the index of its CPU build serves torch and nothing else; the second
# command brings them.
define install
test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
$(BIN)/python -m pip install --no-deps --retries 1 $(TORCH_INDEX) "$(TORCH)"
$(BIN)/python -m pip install $(1)
endef

$(STAMP): pyproject.toml Makefile
	$(call install,$(WHAT))
	touch $@ $(DEMO_STAMP)

# Without the tools of a developer, which take longer to install than the demo.
$(DEMO_STAMP): pyproject.toml Makefile
	$(call install,-e ".[demo]")
	touch $@

demo: $(DEMO_STAMP)
	$(BIN)/python -m experiments.node_cls --model gat --compare --seeds 0 --epochs 20

test: $(STAMP)
	$(PYTEST) $(ARGS)

test-long: $(STAMP)
	$(PYTEST) -m long $(ARGS)

mutants: $(STAMP)
	$(BIN)/python tests/mutants/run.py $(ARGS)

PROGRAMS ?= 20000
SEED ?= 0
attack: $(STAMP)
	GACT_GRAPH_ATTACK=$(PROGRAMS) $(BIN)/python -m pytest -m "long or not long" --hypothesis-seed=$(SEED) \
		tests/attack/test_random_programs.py tests/attack/test_random_stacks.py \
		tests/attack/test_growth.py tests/capture/test_rebuild.py \
		tests/api/budget/test_monotone.py tests/experiments/test_long_kills.py $(ARGS)

scatter: $(STAMP)
	.ci/scatter

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $(CSRC)
	git ls-files -z | grep -zvE '\.(svg|json|png)$$' | xargs -0 $(BIN)/codespell

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CSRC)

docs: $(STAMP)
	$(BIN)/python -m experiments.tables --check
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

# A folder for each minor version, on the branch gh-pages of this clone; nothing is pushed. mike looks
# for mkdocs on the path.
docs-version: docs
	PATH="$(abspath $(BIN)):$$PATH" NO_MKDOCS_2_WARNING=1 $(BIN)/mike deploy --update-aliases \
		"$$($(BIN)/python -c 'import gact_graph as g; print(g.__version__.rpartition(".")[0])')" latest
	$(BIN)/mike set-default latest

# Repeats the measurements of results/ that an older library made: many hours, on a quiet machine.
DATA ?= ../shared/data
numbers: $(STAMP)
	$(BIN)/python .ci/measure.py $(DATA) $(ARGS)
	$(BIN)/python -m experiments.tables

wheel: $(STAMP)
	rm -rf build dist
	$(BIN)/python -m build --wheel --outdir build/pure
	$(BIN)/python .ci/prebuild.py build/pure/*.whl dist

# Downloads gigabytes for each torch that the CPU index does not have.
versions: wheel
	$(BIN)/python .ci/versions.py dist/*.whl $(ARGS)

clean:
	rm -rf $(VENV) build dist site *.egg-info
