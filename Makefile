# demo, test and lint build .venv by themselves.
# `make PYTHON=/path/to/python test` uses that interpreter as it is: no venv, no install.

ifdef PYTHON
PY := $(PYTHON)
ENVIRONMENT :=
export PYTHONPATH := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))
else
PY := $(CURDIR)/.venv/bin/python
ENVIRONMENT := .venv/.installed
endif

NEWEST := $(CURDIR)/.venv-newest

.PHONY: demo test test-defaults test-newest test-slow test-all soak lint docs clean

# Trains on 4 ranks, then goes on from step 20 on 2.
demo: $(ENVIRONMENT)
	folder=$$(mktemp -d) && trap 'rm -rf "$$folder"' EXIT && export PYTHON='$(PY)' && \
	scripts/launch_multi_rank.sh 4 examples/train_qwen3_moe.py --checkpoint "$$folder" && \
	scripts/launch_multi_rank.sh 2 examples/train_qwen3_moe.py --resume "$$folder" --steps 30

# Minutes, on two cores. What is marked slow is left to test-slow.
test: $(ENVIRONMENT)
	$(PY) -m pytest tests -m 'not slow'

# The library runs under a default device and dtype of torch that are not those of the tests.
test-defaults: $(ENVIRONMENT)
	TEST_DEFAULT_DEVICE=meta TEST_DEFAULT_DTYPE=bfloat16 $(PY) -m pytest tests -m 'not slow'

# Gigabytes: installs the newest torch and Triton of the tested range, with CUDA, beside .venv.
test-newest: .venv-newest/.installed
	$(NEWEST)/bin/python -m pytest tests -m 'not slow'

test-slow: $(ENVIRONMENT)
	$(PY) -m pytest tests -m slow

test-all: $(ENVIRONMENT)
	$(PY) -m pytest tests

# An hour: 200 short programs that must exit with 0, and 200 times ranks ended at random.
soak: $(ENVIRONMENT)
	$(PY) scripts/soak.py exits --number 200
	$(PY) scripts/soak.py kills --number 200

lint: $(ENVIRONMENT) docs
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	$(PY) -m pyright --pythonpath "$$(command -v $(PY))"
	$(PY) -c 'from importlinter.cli import lint_imports_command; lint_imports_command()' --no-logo --no-cache

# A link that leads nowhere or a docstring that does not parse is an error. Pages come in site/.
docs: $(ENVIRONMENT)
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict --quiet

# constraints.txt names one torch release: `torch>=...` alone may fetch gigabytes more.
# Of the clients of deep_ep, 4 MB, a test needs a few modules: most of what they depend on is left out.
.venv/.installed: pyproject.toml constraints.txt tests/clients.txt
	python3 -m venv .venv
	.venv/bin/pip install -c constraints.txt -e '.[dev]'
	.venv/bin/pip install --no-deps -r tests/clients.txt
	touch $@

# torch names its Triton, and its build of NVRTC.
.venv-newest/.installed: pyproject.toml constraints.txt tests/clients.txt
	python3 -m venv .venv-newest
	grep -vE '^(torch|triton|nvidia-cuda-nvrtc)==' constraints.txt > .venv-newest/constraints.txt
	$(NEWEST)/bin/pip install 'torch==2.15.*'
	$(NEWEST)/bin/pip install -c .venv-newest/constraints.txt -e '.[dev]'
	$(NEWEST)/bin/pip install --no-deps -r tests/clients.txt
	touch $@

clean:
	rm -rf .venv .venv-newest build dist site *.egg-info .hypothesis .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
