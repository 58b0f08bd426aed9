# Needs only python3 (3.11 or newer), pip, make and git.
PY := .venv/bin/python

.PHONY: demo test test-all test-cuda lint
demo: .venv/ok  ## train a GPT on 8 fake CPU devices under every strategy
	$(PY) -m hfjax demo

test: .venv/ok  ## the standard suite
	$(PY) -m pytest -q -n 2 -m "not slow"

test-all: .venv/ok  ## with the long matrix: every strategy in float64
	$(PY) -m pytest -q -n 2

test-cuda: .venv/ok  ## install the wheels that compile for CUDA (no GPU is needed), run what uses them
	python3 -m pip --python .venv install --quiet --no-deps \
	  $$($(PY) -c "from hfjax.target import wheels; print(*wheels())")
	$(PY) -m pytest -q -m cuda

lint: .venv/ok
	.venv/bin/ruff format --check .
	.venv/bin/ruff check .
	.venv/bin/pyright
	.venv/bin/lint-imports

# --without-pip: Debian's python3 has no ensurepip; the outer pip fills the venv.
.venv/ok: pyproject.toml
	python3 -m venv --without-pip .venv
	python3 -m pip --python .venv install --quiet --editable '.[dev]'
	touch $@
