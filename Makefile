# make demo          set up, serve the trained world, walk its tour, write demo.mp4 and demo.png, keep serving
# make demo ONCE=1   the same, and stop after the files are written
# make test          set up and run the whole test suite (what CI runs)
# make nightly       the slow tests
# make lint          ruff and mypy
# make clean         remove the environment and what the demo wrote
#
# PYTHON=python3.12 chooses the interpreter, VENV=dir the environment, DEVICE=cpu|cuda the build (default: what the
# machine has), TORCH_INDEX=url where CPU builds of torch are; see scripts/setup_env.py.

PYTHON ?= python3.11
VENV ?= .venv
DEMO_ARGS ?=
PYTEST_ARGS ?=

.PHONY: setup demo test nightly lint clean

setup:
	@command -v $(PYTHON) >/dev/null || { \
	  echo "set-up failed: there is no '$(PYTHON)' on PATH. Install Python 3.11 (Debian and Ubuntu: apt install python3.11 python3.11-venv)," \
	       "or name another one: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	@$(PYTHON) scripts/setup_env.py $(VENV)

demo: setup
	@$(VENV)/bin/vllm-omni demo $(if $(filter-out 0 no,$(ONCE)),--once) $(DEMO_ARGS)

test: setup
	@$(VENV)/bin/python -m pytest -m "not nightly" $(PYTEST_ARGS)

nightly: setup
	@$(PYTHON) scripts/setup_env.py $(VENV) ray
	@$(VENV)/bin/python -m pytest -m nightly $(PYTEST_ARGS)

lint: setup
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/ruff format --check .
	@$(VENV)/bin/mypy

clean:
	rm -rf $(VENV) .try_vllm demo.mp4 demo.png demo_truth.png demo_world demo_server.log
