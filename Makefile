# Needs only python3 (3.11 or newer), pip, make and git.
PY := .venv/bin/python
FAST := -m "not slow and not cuda and not gpu"

.PHONY: demo test test-all test-cuda lint
demo: .venv/ok  ## train a GPT on 8 fake CPU devices under every strategy
	$(PY) -m hfjax demo

test: .venv/ok  ## the standard suite
	$(PY) -m pytest -n 2 -m "not slow"

test-all: .venv/ok  ## everything, the long matrix included
	$(PY) -m pytest -n 2

lint: .venv/ok
	.venv/bin/ruff format --check . && .venv/bin/ruff check . && .venv/bin/pyright && .venv/bin/lint-imports

# --without-pip: Debian's python3 has no ensurepip; the outer pip fills the venv.
.venv/ok: pyproject.toml
	python3 -m venv --without-pip .venv
	python3 -m pip --python .venv install --quiet --editable '.[dev]'
	touch $@
