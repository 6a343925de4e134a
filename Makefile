# Every target sets up what it needs. Nothing outside this checkout is changed, except by `test-system`,
# which installs Debian packages where a test needs a system.

# The environment's interpreter: a version (3.13), a command or a path; of several, the first that starts: a shim of pyenv may exist
# and fail.
PYTHON ?= 3.12 3.13 python3
describe := import sys, venv, ensurepip; assert (3, 12) <= sys.version_info[:2] <= (3, 13); \
    print("%d.%d" % sys.version_info[:2], sys.base_prefix, sys.version_info[2])
candidates = $(foreach each,$(PYTHON),$(if $(filter 3.%,$(each)),python$(each) "$$HOME"/.pyenv/versions/$(each).*/bin/python,$(each)))
interpreter = $(shell for each in $(candidates); do \
    "$$each" -c '$(describe)' > /dev/null 2>&1 && echo "$$each" && break; done)
VENV   := .venv
BIN    := $(VENV)/bin

# Caches, temporary files and NeMo-Run's experiments stay in the checkout, unless UV_CACHE_DIR or NEMORUN_HOME names another place.
export UV_CACHE_DIR   ?= $(CURDIR)/.cache/uv
export TMPDIR         := $(CURDIR)/.cache/tmp
export NEMORUN_HOME   ?= $(CURDIR)/.runs
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Compiled modules stay in the checkout: each rank and each command of a test would compile this project's own again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup setup-dev profile test test-integration test-system test-versions test-gpu lint docs bench bench-gpu fuzz clean

help:
	@echo "make profile      train gpt_tiny on 2 CPU ranks under the torch profiler, and show what was captured"
	@echo "make setup        build .venv with everything a training and its analysis need"
	@echo "make test         unit tests, all in one process (REQUIRE=a,b fails what would be skipped for want of a or b)"
	@echo "make test-integration  tests that start ranks, launchers, trainings and commands"
	@echo "make test-system  fresh environments and clones, resumes of every layout, a real Slurm and nsys (root on Debian)"
	@echo "make test-versions  the recipes and Megatron Bridge with each supported megatron-core (VERSIONS=0.18.2 for one)"
	@echo "make test-gpu     the whole chain on this machine's GPUs, in the Python you name: GPU_PYTHON=python3 (nothing is installed)"
	@echo "make lint         ruff, mypy, import-linter"
	@echo "make docs         build the documentation into site/"
	@echo "make bench        one table of all speeds that need no GPU, next to those of the last release (ten minutes)"
	@echo "make bench-gpu    what a capture costs a training on this machine's GPU, for each option of the profiler (eight minutes)"
	@echo "make fuzz         look for input that a reader does not survive: EXAMPLES=1000 of each kind, in some minutes"

setup: $(VENV)/.installed
setup-dev: $(VENV)/.installed-dev

# uv resolves and unpacks in seconds what takes pip minutes; what pip is told about packages is passed on to it.
define install
	@mkdir -p $(TMPDIR)
	@$(BIN)/python tools/install.py --constraint constraints.txt --editable '.[$(1)]'
endef

# Touched only when the environment is made: the first time, and when another PYTHON is asked for.
$(VENV)/.created: FORCE
	@mkdir -p $(TMPDIR)
	@test -e $@ -a "$(origin PYTHON)" = file || { python="$(interpreter)"; \
	    found=$$("$$python" -c '$(describe)') || { echo "error: '$(PYTHON)' is not Python 3.12 or 3.13 with venv and ensurepip" \
	        "(Debian: apt install python3-venv). Type: make PYTHON=/path/to/python3.12 …" >&2; exit 2; }; \
	    test -e $@ && test "$$($(BIN)/python -c '$(describe)')" = "$$found" || { echo "Python $${found%% *}: $$python"; \
	        "$$python" -m venv --clear $(VENV) && touch $@; }; }
FORCE:

$(VENV)/.installed: $(VENV)/.created pyproject.toml constraints.txt
	$(call install,megatron$(comma)analysis)
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(call install,megatron$(comma)analysis$(comma)dev)
	@touch $@

comma := ,

profile: $(VENV)/.installed
	@mkdir -p $(TMPDIR)
	@$(BIN)/python launch/experiment.py --recipe gpt_tiny --executor local_torchrun --nproc 2 \
		--profiler torch --steps 4:6 --ranks 0,1 train.train_iters=12

# When it is loaded, megatron-core decorates functions with torch.compile, which loads the compiler: 3 s of a rank's start
# for nothing, since a training on a CPU compiles none.
test test-integration test-system: export TORCHDYNAMO_DISABLE := 1

# A process imports torch and NeMo-Run before its first test: a third one on two cores costs more than it saves.
# Shuffled. The first lines name the seed; PYTEST_ARGS=--randomly-seed=N repeats it.
test: $(VENV)/.installed-dev
	@rm -rf $(TMPDIR) && mkdir -p $(TMPDIR)
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "not integration and not system and not gpu" --durations 10 --basetemp $(TMPDIR)/pytest $(PYTEST_ARGS)

test-integration: $(VENV)/.installed-dev
	@rm -rf $(TMPDIR) && mkdir -p $(TMPDIR)
	$(BIN)/python -m pytest -n 3 --dist loadfile -m "integration and not system and not gpu" --durations 10 --basetemp $(TMPDIR)/pytest $(PYTEST_ARGS)

# More processes than `test`: these wait for Slurm, nsys and launchers much of their time. In their order, the longest first.
test-system: $(VENV)/.installed-dev
	@rm -rf $(TMPDIR) && mkdir -p $(TMPDIR)
	$(BIN)/python -m pytest -p no:randomly -n 4 --dist loadfile --no-loadscope-reorder -m "system and not gpu" --durations 10 --basetemp $(TMPDIR)/pytest $(PYTEST_ARGS)

# Environments of their own in .cache/versions.
VERSIONS ?=
test-versions: $(VENV)/.created
	@rm -rf $(TMPDIR) && mkdir -p $(TMPDIR)
	$(BIN)/python tools/versions.py $(VERSIONS)

# A container's own Python, with its own torch: nothing is created or installed. One process: it runs its jobs side by side itself.
GPU_PYTHON ?= python3
test-gpu:
	@rm -rf $(TMPDIR) && mkdir -p $(TMPDIR)
	REQUIRE=cuda,megatron,nemo_run $(GPU_PYTHON) -m pytest tests/gpu -p no:cacheprovider --basetemp $(TMPDIR)/pytest $(PYTEST_ARGS)

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: $(VENV)/.installed-dev
	@REPOSITORY_URL="$$(git remote get-url origin 2>/dev/null | sed -n -e 's#^git@\([^:]*\):#https://\1/#' -e 's#\.git$$##' -e '/^https:/p')" \
	    $(BIN)/mkdocs build --strict --quiet

bench: $(VENV)/.installed
	@mkdir -p $(TMPDIR)
	$(BIN)/python benchmarks/table.py

# The Python of the machine, as in test-gpu.
bench-gpu:
	@mkdir -p $(TMPDIR)
	$(GPU_PYTHON) benchmarks/capture_cost.py

EXAMPLES ?= 1000
fuzz: export TORCHDYNAMO_DISABLE := 1
fuzz: $(VENV)/.installed-dev
	@mkdir -p $(TMPDIR)
	FUZZ_EXAMPLES=$(EXAMPLES) $(BIN)/python -m pytest -n auto tests/hostile/test_fuzz.py $(PYTEST_ARGS)

clean:
	rm -rf $(VENV) .cache .runs site
