# Each target does all the set-up it needs. On a GPU machine: make install TORCH='torch==2.13.0'
# with the index that has your CUDA build in PIP_EXTRA_INDEX_URL.

PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin

.PHONY: install redis-server demo test sanitize test-gpu bench-gpu lint format bench-peers clean

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -c 'import torch' 2>/dev/null || $(BIN)/pip install --quiet '$(TORCH)'
	$(BIN)/pip install --quiet --editable '.[dev]'
	touch $@

# The tests of the Redis tier start a server of their own; root on Debian gets one here.
redis-server:
	@command -v redis-server >/dev/null || command -v valkey-server >/dev/null || \
	{ test "$$(id -u)" = 0 && apt-get update -qq && \
	  DEBIAN_FRONTEND=noninteractive apt-get install -qq -y redis-server >/dev/null; } || \
	echo '*** NO REDIS-SERVER: the Redis tier will not be tested; apt-get install redis-server ***'

demo: install
	$(BIN)/lora-serve demo

test: install redis-server lint sanitize
	$(BIN)/python -m pytest -n 2 --dist loadgroup --no-loadscope-reorder

# The kernels on every path of this CPU, watched for memory errors and undefined behaviour.
SANITIZERS := address,undefined
sanitize: install
	@if echo 'int main() {}' | $(CXX) -fsanitize=$(SANITIZERS) -x c++ - -o /dev/null 2>/dev/null; \
	then CXX='$(CXX)' $(BIN)/cmake --workflow --preset address; \
	else echo '*** NO SANITIZERS: the kernels are not watched; install g++ or clang++ with libasan and libubsan ***'; fi

# On a machine with an NVIDIA GPU: kernels, families, exactness, and the failures over HTTP.
# PYTHON_GPU names another Python that has torch and Triton, where nothing can be installed.
PYTHON_GPU ?= $(BIN)/python
GPU_FLAGS := --device cuda --batch-invariant --kv-cache-memory-bytes 2000000000
test-gpu bench-gpu: $(if $(findstring $(BIN),$(PYTHON_GPU)),install)

test-gpu:
	$(PYTHON_GPU) -m pytest -m gpu
	$(PYTHON_GPU) -m pytest -m 'not slow' tests/e2e --server-flags '$(GPU_FLAGS)'

# Under ten minutes; writes benchmarks/results/gpu-<card>.json and .md.
bench-gpu:
	$(PYTHON_GPU) -m benchmarks.gpu

lint: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: install
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# The first run builds the peers' environments below ~/.cache/lora-serve (or $$LORA_SERVE_PEERS).
# Some peers only: make bench-peers PEERS="lora-serve llama.cpp"
bench-peers: install
	$(BIN)/python -m benchmarks.run_peers $(PEERS) --page docs/performance.md

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
