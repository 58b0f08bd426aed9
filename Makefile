# Needs only python3 (3.12, with jax 0.12; or 3.11, with jax 0.10.2), pip, make and git.
# Another Python: make test-cuda PYTHON=python3.12 VENV=.venv312
# More of the GPU: make gpu GPU="--out DIR --only ceilings 124M-16 --record"; make gpu GPU=--help
PYTHON := python3
VENV := .venv
PY := $(VENV)/bin/python

# What depends most on jax: the rules by which a program is partitioned, and derivatives.
PARTITIONER := $(addprefix tests/test_,spmd.py spmd_rules.py custom_derivatives.py global_batch.py \
  hi_primitives.py)

.PHONY: demo test test-all test-jax pages wheels test-cuda gpu lint docs
demo: $(VENV)/ok  ## train a GPT on 8 fake CPU devices under every strategy
	$(PY) -m hfjax demo

# BUDGET=--budget fails where a file of tests has become dearer; BUDGET=--budget=accept accepts it.
test: $(VENV)/ok  ## the standard suite: each law once
	$(PY) -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder -m "not slow" $(BUDGET)

test-all: $(VENV)/ok  ## all cases of each law: hours
	$(PY) -m pytest -q -n 2 --dist worksteal

# In an environment of its own: make test-jax JAX=0.12.0 PYTHON=python3.12.
test-jax:  ## the partitioner's suite with another jax
	$(if $(JAX),,$(error which jax? make test-jax JAX=0.12.0))
	$(MAKE) $(VENV)-jax-$(JAX)/ok VENV=$(VENV)-jax-$(JAX) PYTHON=$(PYTHON)
	python3 -m pip --python $(VENV)-jax-$(JAX) install --quiet "jax==$(JAX)"
	$(VENV)-jax-$(JAX)/bin/python -c "import jax; print('jax', jax.__version__)"
	$(VENV)-jax-$(JAX)/bin/python -m pytest -q -n 2 -m "not slow" $(PARTITIONER)

pages: $(VENV)/ok  ## the commands and programs of all pages but those of `make test`
	$(PY) -m pytest -q -n 2 --dist worksteal -m slow -k "not demo" tests/test_docs.py

wheels: $(VENV)/cuda/ok  ## install the wheels that compile for CUDA (no GPU is needed)

# Aside: among the other packages JAX would start them in every program.
$(VENV)/cuda/ok: $(VENV)/ok
	rm -rf $(VENV)/cuda
	python3 -m pip --python $(VENV) install --quiet --no-deps --target $(VENV)/cuda \
	  $$($(PY) -c "from hfjax.analysis.targets import wheels; print(*wheels())")
	touch $@

test-cuda: wheels  ## run what reads programs compiled for GPUs
	$(PY) -m pytest -q -m cuda

gpu:  ## on a machine with a GPU, in ten minutes: its tests and benchmarks; installs nothing
	PYTHONPATH=. $(PYTHON) -m benchmarks.gpu $(GPU)

docs: $(VENV)/ok  ## build/docs/index.html: these pages with a reference and a search, as a site
	$(PY) -m docs.site.build

lint: $(VENV)/ok
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/pyright
	$(VENV)/bin/lint-imports

# --without-pip: Debian's python3 has no ensurepip; the outer pip fills the environment.
$(VENV)/ok: pyproject.toml
	$(PYTHON) -m venv --without-pip $(VENV)
	python3 -m pip --python $(VENV) install --quiet --editable '.[dev]'
	touch $@
