# Each target does all the set-up it needs. On a GPU machine: make install TORCH='torch==2.13.0'
# with the index that has your CUDA build in PIP_EXTRA_INDEX_URL.

PYTHON ?= python3
TORCH ?= torch==2.13.0
# All but torch is installed in the versions of this file, checked by hash. LOCK= takes the newest.
LOCK ?= requirements/cpu.lock
VENV := .venv
BIN := $(VENV)/bin

.PHONY: help always install check lock audit redis-server chromium demo docs test sanitize gpu-python gpu-wheels test-gpu test-gpu-kernels \
  test-gpu-ranks test-gpu-servers bench-gpu lint format bench-peers clean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-18s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

install: $(VENV)/.installed  ## .venv with everything, and the kernels compiled

# An editable install maps every module to its file, so it is made again when a module has come, gone
# or moved: two minutes of processor time, most of it for the kernels, which it compiles anew.
MODULES := build/modules.txt
$(MODULES): always
	@mkdir -p $(@D)
	@find lora_serve -name '*.py' | sort > $@.now
	@cmp -s $@.now $@ || cp $@.now $@
always:

$(VENV)/.installed: pyproject.toml $(LOCK) CMakeLists.txt $(MODULES) \
  $(wildcard csrc/*/*.* csrc/*/*/*.*)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(if $(LOCK),$(BIN)/pip install --quiet --no-deps --require-hashes --requirement $(LOCK))
	$(BIN)/python -c 'import torch' 2>/dev/null || $(BIN)/pip install --quiet '$(TORCH)'
	$(BIN)/pip install --quiet $(if $(LOCK),--no-deps) --editable '.[dev]'
	$(if $(LOCK),$(BIN)/pip check)
	@! command -v $(CXX) >/dev/null || $(BIN)/python -c 'import lora_serve.ops._cpu' || \
	{ echo '*** csrc WAS NOT BUILT, though $(CXX) is here; see why: $(BIN)/pip install --verbose --no-deps --editable . ***'; exit 1; }
	touch $@

# Where there is a network: the newest versions that pyproject.toml permits, with their hashes.
# torch is left to TORCH, and so is what comes with its CUDA builds alone; these pin their Triton,
# CPU builds pin none.
TOOLS := build/tools
lock:  ## write the newest permitted versions into $(LOCK)
	$(PYTHON) -m venv $(TOOLS) && $(TOOLS)/bin/pip install --quiet uv
	echo '$(TORCH)' > $(TOOLS)/torch.txt
	echo "triton>=3.6; sys_platform == 'linux' and platform_machine == 'x86_64'" > $(TOOLS)/triton.txt
	$(TOOLS)/bin/uv pip compile pyproject.toml --quiet --extra dev --upgrade --generate-hashes \
	  --universal --python-version 3.11 --constraints $(TOOLS)/torch.txt \
	  --overrides $(TOOLS)/triton.txt --no-header --no-annotate --no-emit-index-url --no-emit-find-links \
	  --output-file $(TOOLS)/all.lock
	{ echo '# Written by `make lock`.'; awk '/^[a-z]/ { left_out = /^(torch|nvidia-|cuda-)/ } \
	  !left_out && !/^#/' $(TOOLS)/all.lock; } > $(LOCK)

# Where there is a network: known holes in the versions of $(LOCK). What could not be looked up
# counts as a hole.
audit:  ## look for known holes in the versions of $(LOCK)
	@$(PYTHON) -m venv $(TOOLS) && $(TOOLS)/bin/pip install --quiet pip-audit || \
	{ echo '*** NOT AUDITED: pip-audit could not be installed ***'; exit 1; }
	@$(TOOLS)/bin/pip-audit --strict --disable-pip --require-hashes --progress-spinner off \
	  --requirement $(LOCK) || \
	{ echo '*** NOT CLEAN, OR NOT AUDITED because the database cannot be reached: see above ***'; exit 1; }

# The tests of the Redis tier start a server of their own; root on Debian gets one here.
redis-server:
	@command -v redis-server >/dev/null || command -v valkey-server >/dev/null || \
	{ test "$$(id -u)" = 0 && apt-get update -qq && \
	  DEBIAN_FRONTEND=noninteractive apt-get install -qq -y redis-server >/dev/null; } || \
	echo '*** NO REDIS-SERVER: the Redis tier will not be tested; apt-get install redis-server ***'

# The page is tested in a real browser; root on Debian gets one here.
chromium:
	@command -v chromium >/dev/null || command -v google-chrome >/dev/null || \
	{ test "$$(id -u)" = 0 && apt-get update -qq && \
	  DEBIAN_FRONTEND=noninteractive apt-get install -qq -y chromium >/dev/null; } || \
	echo '*** NO CHROMIUM: the page /ui will not be tested in a browser; apt-get install chromium ***'

demo: install  ## replace an adapter under a server, and see the answers change
	$(BIN)/lora-serve demo

docs: install  ## the documentation as a site, in site/
	NO_MKDOCS_2_WARNING=1 PYTHONPATH=. $(BIN)/python -m mkdocs build --quiet --site-dir site
	@echo 'open site/index.html'

# mypy and the kernels' tests take one core each, so they run side by side.
test: install redis-server chromium  ## lint, kernels under sanitizers, the whole suite; what CI runs
	$(MAKE) --jobs=2 --output-sync=target lint sanitize
	$(BIN)/python -m pytest -n 2 --dist loadscope --no-loadscope-reorder

# What a change breaks first: 80 s of processor time, so under a minute on two idle cores. The first
# time mypy has no cache, and takes 60 s more. These folders start no server and load no model; the
# explorations of all states are left to `make test`.
CHECKED := $(addprefix tests/,adapters bench config docs kv kv_tiers layers observability scheduler \
  text test_identity.py)
check: install lint  ## lint and the fast tests, in under a minute
	$(BIN)/python -m pytest -n 2 --dist loadscope --no-loadscope-reorder \
	  --ignore-glob='*liveness*' $(CHECKED)

# The kernels on every path of this CPU, watched for memory errors and undefined behaviour.
SANITIZERS := address,undefined
sanitize: install  ## the kernels, watched for memory errors and undefined behaviour
	@if echo 'int main() {}' | $(CXX) -fsanitize=$(SANITIZERS) -x c++ - -o /dev/null 2>/dev/null; \
	then CXX='$(CXX)' $(BIN)/cmake --workflow --preset address; \
	else echo '*** NO SANITIZERS: the kernels are not watched; install g++ or clang++ with libasan and libubsan ***'; fi

# On a machine with an NVIDIA GPU: kernels, families, exactness, and the failures over HTTP. Each of
# the two targets ends by itself before $(GPU_SECONDS) are over, and fails if tests are left then.
# PYTHON_GPU names another Python that has torch and Triton, where nothing can be installed: what
# else it needs comes from $(GPU_WHEELS), and csrc is built into the tree.
PYTHON_GPU ?= $(BIN)/python
GPU_FLAGS := --device cuda --batch-invariant --kv-cache-memory-bytes 200000000
GPU_JOBS ?= 4
GPU_SECONDS ?= 540
GPU_WHEELS := dist/gpu-wheels
GPU_SITE := $(CURDIR)/build/gpu-site

ifeq ($(PYTHON_GPU),$(BIN)/python)
RUN_GPU := $(PYTHON_GPU)
gpu-python: install
else
RUN_GPU := PYTHONPATH=$(GPU_SITE):$$PYTHONPATH $(PYTHON_GPU)
gpu-python: $(GPU_SITE)/.installed
	cmake -S . -B build/gpu -DCMAKE_BUILD_TYPE=Release \
	  -DPython_EXECUTABLE="$$($(RUN_GPU) -c 'import sys; print(sys.executable)')" \
	  -Dnanobind_DIR="$$($(RUN_GPU) -m nanobind --cmake_dir)" >/dev/null \
	&& cmake --build build/gpu --parallel && cmake --install build/gpu --prefix . \
	|| echo '*** CSRC WAS NOT BUILT: KV is copied by torch, and the CPU has reference kernels only ***'
endif

$(GPU_SITE)/.installed: $(wildcard $(GPU_WHEELS)/*.whl)
	rm -rf $(GPU_SITE) && mkdir -p $(GPU_SITE)
	$(if $^,$(PYTHON_GPU) -m pip install --quiet --no-index --no-deps --target $(GPU_SITE) $^)
	touch $@

# Where there is a network: what a machine of this Python that has these packages lacks.
PYTHON_GPU_VERSION ?= 3.12
PYTHON_GPU_HAS ?= torch==2.11.0 triton==3.6.0 transformers==5.17.0 numpy==2.5.2 \
  safetensors==0.8.0 tokenizers==0.23.2 huggingface_hub==1.33.0 accelerate==1.15.0
gpu-wheels:  ## fetch what a GPU machine without a network lacks
	$(PYTHON) -m benchmarks.gpu.wheels --out $(GPU_WHEELS) \
	  --python $(PYTHON_GPU_VERSION) --has $(PYTHON_GPU_HAS)

test-gpu: test-gpu-kernels test-gpu-servers  ## on a machine with an NVIDIA GPU

GPU_PYTEST = $(RUN_GPU) -m pytest -vv --session-timeout=$(GPU_SECONDS)
test-gpu-kernels: gpu-python
	$(GPU_PYTEST) -m gpu tests/gpu/test_device.py
	$(GPU_PYTEST) -m gpu --ignore tests/gpu/test_device.py -n $(GPU_JOBS) --dist loadfile

test-gpu-ranks: gpu-python  ## on a machine with two or four
	$(GPU_PYTEST) -m gpu tests/gpu/test_ranks.py

test-gpu-servers: gpu-python
	$(GPU_PYTEST) -m 'not slow' -n $(GPU_JOBS) --dist loadfile tests/e2e --server-flags '$(GPU_FLAGS)'

# Under ten minutes; writes $(GPU_OUT)/gpu-<card>.json and .md as figures come. Again, it goes on with
# what is missing there.
GPU_OUT ?= benchmarks/results
bench-gpu: gpu-python  ## measure the card of this machine
	$(RUN_GPU) -m benchmarks.gpu --out $(GPU_OUT)

lint: install  ## format, style, types, import contracts
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: install  ## format and mend what can be mended
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# The first run builds the peers' environments below ~/.cache/lora-serve (or $$LORA_SERVE_PEERS).
# Some peers only: make bench-peers PEERS="lora-serve llama.cpp"
bench-peers: install  ## measure lora-serve beside other engines
	$(BIN)/python -m benchmarks.peers $(PEERS) --page docs/performance.md

clean:  ## remove what was built and installed here
	rm -rf $(VENV) build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache
