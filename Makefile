# make demo          set up, serve the trained world, walk its tour, write demo.mp4 and demo.png, keep serving
# make demo ONCE=1   the same, and stop after the files are written
# make check         lint, types, the tests of the source code and every test that takes less than half a second and needs neither engine nor browser: before each commit
# make durations     record in tests/durations.json which tests take half a second or more; `make check` leaves these out
# make test          set up and run the test suite, without the nightly tests
# make nightly       the slow tests; SHARD=3/8 runs the third of eight shards of them
# make test-cuda     the tests that need a GPU, several side by side on each GPU of the machine
# make lint          ruff and mypy
# make docs          build the documentation site into build/site
# make results       write the tables of measured results from benchmarks/results
# make release       write wheel, sdist, bill of materials, licence report and checksums of the commit to dist/
# make mutants       change access, codec, scheduling and the worker in every small way; what no test notices is listed
# .ci/run            what CI runs: lint, test, and the nightly shard that the commit selects (NIGHTLY_SHARD=3/8: another)
# make clean         remove the environment and what the demo wrote
#
# PYTHON=python3.12 chooses the interpreter, VENV=dir the environment, DEVICE=cpu|cuda the build (default: what the
# machine has), TORCH_INDEX=url where CPU builds of torch are; see scripts/setup_env.py. PYTEST_ARGS goes to pytest:
# PYTEST_ARGS=-n0 runs the tests in one process, PYTEST_ARGS=--durations=40 lists the slowest.

PYTHON ?= python3.11
VENV ?= .venv
# Tests start hundreds of processes; each would compile every module again where the environment forbids to keep bytecode.
export PYTHONDONTWRITEBYTECODE :=
DEMO_ARGS ?=
PYTEST_ARGS ?=
MUTANTS ?=
# SHARD=3/8 is the third of eight groups of pytest-split.
SHARD_ARGS = $(if $(SHARD),--group $(firstword $(subst /, ,$(SHARD))) --splits $(lastword $(subst /, ,$(SHARD))))

.PHONY: setup demo check engineless durations test nightly test-cuda lint docs results release mutants clean

setup:
	@command -v $(PYTHON) >/dev/null || { \
	  echo "set-up failed: there is no '$(PYTHON)' on PATH. Install Python 3.11 (Debian and Ubuntu: apt install python3.11 python3.11-venv)," \
	       "or name another one: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	@$(PYTHON) scripts/setup_env.py $(VENV)

demo: setup
	@$(VENV)/bin/vllm-omni demo $(if $(filter-out 0 no,$(ONCE)),--once) $(DEMO_ARGS)

check: setup
	@$(MAKE) --no-print-directory -j2 lint engineless

engineless: setup
	@$(VENV)/bin/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m "not nightly and not engine and not browser and not slow" $(PYTEST_ARGS)

durations: setup
	@$(VENV)/bin/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder -m "not nightly and not engine and not browser" \
	  --store-durations --clean-durations --durations-path tests/durations.json $(PYTEST_ARGS)
	@$(VENV)/bin/python -c "import json, pathlib; file = pathlib.Path('tests/durations.json'); \
	  slow = {test: round(s, 1) for test, s in sorted(json.loads(file.read_text()).items()) if s >= 0.5}; \
	  file.write_text(json.dumps(slow, indent=0) + '\n')"

test: setup
	@$(VENV)/bin/python -m pytest -n auto --dist loadfile --no-loadscope-reorder -m "not nightly" $(PYTEST_ARGS)

nightly: setup
	@$(PYTHON) scripts/setup_env.py $(VENV) ray docs release
	@$(VENV)/bin/python -m pytest -m nightly -rs $(SHARD_ARGS) $(PYTEST_ARGS)

# pytest exits with 5 if PYTEST_ARGS selects no test; one of the two runs may select none.
test-cuda: setup
	@shared=0; alone=0; \
	$(VENV)/bin/python -m pytest -n auto --dist loadfile --no-loadscope-reorder -m "cuda and not whole_gpu" $(PYTEST_ARGS) || shared=$$?; \
	$(VENV)/bin/python -m pytest -m "cuda and whole_gpu" $(PYTEST_ARGS) || alone=$$?; \
	[ $$shared = 5 ] && shared=$$alone; [ $$alone = 5 ] && alone=$$shared; \
	exit $$((shared ? shared : alone))

lint: setup
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/ruff format --check .
	@$(VENV)/bin/mypy

docs: setup
	@$(PYTHON) scripts/setup_env.py $(VENV) docs
	@$(VENV)/bin/python scripts/docs_site.py

results: setup
	@$(VENV)/bin/python scripts/results_page.py

release: setup
	@$(PYTHON) scripts/setup_env.py $(VENV) release
	@$(VENV)/bin/python scripts/release.py

mutants: setup
	@$(PYTHON) scripts/setup_env.py $(VENV) mutants
	@$(VENV)/bin/mutmut run $(MUTANTS)
	@$(VENV)/bin/mutmut results

clean:
	rm -rf $(VENV) .try_vllm mutants demo.mp4 demo.png demo_server.log
