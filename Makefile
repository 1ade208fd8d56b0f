# Everything a contributor or CI runs. `make help` lists it.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
LOCAL := $(VENV)/.local
KERNELS := src/tinkex/engine/packed/kernels
INPUTS := pyproject.toml constraints.txt pins.txt hatch_build.py $(KERNELS)/build.py $(wildcard $(KERNELS)/*.[ch])

.PHONY: help demo prepare prepare-full test test-full test-cluster coverage check format docs site bench conformance compatibility faults faults-proof fuzz schemathesis bom pins kernels kernels-aarch64 golden cookbook cookbook-runs clean

help:  ## this list
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 17

$(READY): $(INPUTS)
	@$(PYTHON) scripts/install.py $(VENV) dev,local,postgres
	@touch $@ $(LOCAL)

$(LOCAL): $(INPUTS)
	@$(PYTHON) scripts/install.py $(VENV) local
	@touch $@

demo: $(LOCAL)  ## watch a small model learn something on this machine (a few minutes)
	@$(BIN)/tinkex demo
	@echo "Before these commands: source $(BIN)/activate"

prepare: $(READY)  ## fetch what the tests need from outside: Chromium, a model, wheels, the official client
	@$(BIN)/python -m tests.prepare

prepare-full: $(READY)  ## the same for the long tests: all official clients and tinker-cookbook too
	@$(BIN)/python -m tests.prepare --full

test: prepare  ## all tests that fit into a few minutes
	@# What fails runs once more, alone: a neighbour on a shared machine makes a test late once, a defect makes it fail again.
	@# The first failure stays in the output. Only after exit code 1, tests failed: after a crash the list of failures is an old one.
	$(BIN)/python -m pytest -m "not full and not timing" -n 2 --dist loadfile --cov --cov-report= || { test $$? -eq 1 && \
	   $(BIN)/python -m pytest -m "not full and not timing" --last-failed --last-failed-no-failures none --exitfirst && \
	   $(BIN)/coverage report --format=total; }
	@# One after the other: what they measure is not each other.
	$(BIN)/python -m pytest -m "timing and not full" || { test $$? -eq 1 && \
	   $(BIN)/python -m pytest -m "timing and not full" --last-failed --last-failed-no-failures none; }

test-full: prepare-full  ## the long ones too
	$(BIN)/python -m pytest

test-cluster: prepare  ## several servers, and engines of several processes, with what they run on
	$(BIN)/python -m pytest tests/cluster

faults: prepare  ## break a real service in seeded ways and check what it promises: SEEDS=100 FIRST=0 JOBS=4
	$(BIN)/python -m tests.faults --seeds $(or $(SEEDS),100) --first $(or $(FIRST),0) --jobs $(or $(JOBS),4)

faults-proof: prepare  ## take each of the service's protections away in turn; the same checker must notice
	$(BIN)/python -m tests.faults --without all --jobs $(or $(JOBS),4)

fuzz: $(READY)  ## a million inputs for each codec, guided by coverage: CODEC=json RUNS=1000000
	nice -n 10 $$($(BIN)/python -m tests.tools atheris) -m tests.fuzz $(CODEC) --runs $(or $(RUNS),1000000)

schemathesis: $(READY)  ## requests made from the OpenAPI document against a real service
	$(BIN)/python -m tests.openapi --examples $(or $(EXAMPLES),50)

coverage: test  ## the lines that make test does not reach, also as pages in build/coverage
	$(BIN)/coverage html --quiet --directory build/coverage
	$(BIN)/coverage report --show-missing

check: $(READY)  ## formatting, lint, spelling, types, the bill of materials, licences, known vulnerabilities
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/codespell
	$(BIN)/mypy
	$(BIN)/mypy examples
	$(BIN)/pyright
	$(BIN)/python scripts/make_bom.py --check
	$(BIN)/python scripts/make_bom.py --audit

bom: $(READY)  ## write bom.cdx.json, the bill of materials of the pinned packages, and check their licences
	$(BIN)/python scripts/make_bom.py

format: $(READY)  ## fix formatting and what the linter can fix
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: $(READY)  ## write the generated pages again
	$(BIN)/python scripts/make_docs.py
	$(BIN)/python scripts/make_reference.py
	$(BIN)/python scripts/make_openapi.py

site: $(READY)  ## the documents as a static site, in site/
	$(BIN)/python scripts/make_site.py

cookbook-runs: prepare-full  ## train with tinker-cookbook, official client and alias (five minutes, in its own environment)
	$(BIN)/python -m pytest tests/compat/cookbook -s

cookbook: $(READY)  ## import every module of tinker-cookbook through the alias (ten minutes, in its own environment)
	$(BIN)/python tests/compat/as_tinker/cookbook_imports.py

conformance: prepare-full  ## every official client and ours through the whole flow, on both built-in models
	$(BIN)/python -m tests.compat.conformance.matrix

compatibility: prepare  ## call every method of the official client and write docs/compatibility.md
	$(BIN)/python -m tests.compat.conformance.methods --write

bench: $(READY)  ## the client beside the official ones, the service beside the plain loop (an hour)
	$(BIN)/python benchmarks/client_cost.py
	$(BIN)/python -m benchmarks.service_latency
	$(BIN)/python -m benchmarks.engine_training
	$(BIN)/python -m benchmarks.engine_sampling
	$(BIN)/python -m benchmarks.engine_memory
	$(BIN)/python -m benchmarks.engine_sharing
	$(BIN)/python -m benchmarks.engine_growth
	$(BIN)/python -m benchmarks.engine_profile
	$(BIN)/python -m benchmarks.engine_peers

pins: $(READY)  ## write pins.txt with the newest releases (run the tests after it)
	$(BIN)/pip install --quiet --upgrade --upgrade-strategy eager --constraint constraints.txt --editable .[dev,local,postgres]
	@{ echo "# What the tests passed with: the releases in .venv, for development and CI. Written by \`make pins\`."; \
	   echo "--constraint constraints.txt"; $(BIN)/pip freeze --exclude-editable --exclude torch; } > pins.txt
	$(BIN)/python scripts/make_bom.py

kernels:  ## compile the C kernels in place (the install does so too; needs gcc, clang or ziglang)
	$(PYTHON) $(KERNELS)/build.py

kernels-aarch64: $(READY)  ## run the kernels for aarch64 under qemu, beside torch (as root it installs what that needs)
	@command -v qemu-aarch64 > /dev/null && command -v aarch64-linux-gnu-gcc > /dev/null || [ "$$(id -u)" != 0 ] || \
	   apt-get install --yes --quiet qemu-user gcc-aarch64-linux-gnu
	$(BIN)/python -m pytest tests/unit/engine/test_decode_kernels.py tests/unit/engine/test_training_kernels.py -k neon -rs

golden: $(READY)  ## record the requests of the official clients again
	$(BIN)/python tests/compat/golden/record.py

clean:  ## remove the environment and all caches
	rm -rf $(VENV) site .coverage .pytest_cache .mypy_cache .ruff_cache dist build
