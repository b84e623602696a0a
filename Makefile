# Everything from a fresh machine with Python 3.11, gcc, make and a package index.
#   make demo   environment + the main job: train a potential, test its error bars near and far from its data
#   make test   environment + lint + the whole test suite, MACE's in an environment of its own
#   make dist   environment + wheel and sdist, checked, and the wheel installed alone and tried
#   make docs   environment + the documentation site, in build/site
#   make reproduce STUDY=nbody PROFILE=quick   a study, see studies/README.md

PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
MACE_BIN := .venv-mace/bin
MACE_STAMP := .venv-mace/.installed

.PHONY: demo test test-mace dist lint format reproduce bench fuzz mutants soak audit docs clean

demo: $(STAMP)
	$(BIN)/blips demo

test: lint
	$(BIN)/pytest -n 2 --dist worksteal
	$(MAKE) dist
	$(MAKE) test-mace

# MACE needs e3nn 0.4.4, other models a later one.
test-mace: $(MACE_STAMP)
	$(MACE_BIN)/pytest tests/mace tests/backbones/test_e3nn_maps.py

# The wheel in an environment of its plain dependencies alone: the README's first screen runs there.
dist: $(STAMP)
	rm -rf build/dist
	$(BIN)/python -m build --no-isolation --outdir build/dist .
	$(BIN)/twine check --strict build/dist/*
	$(BIN)/python recipes/try_wheel.py build/dist/*.whl

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# A study of studies/, or the rest of it: make reproduce STUDY=nbody PROFILE=quick
STUDY ?= errorbars
PROFILE ?= default

reproduce: $(STAMP)
	$(BIN)/python -m studies $(STUDY) --profile $(PROFILE)

bench: $(STAMP)
	$(BIN)/python -m benchmarks --folder results/benchmarks
	for name in training conditioning released batched pool properties; do \
	  $(BIN)/python -m benchmarks.$$name --output results/benchmarks/$$name || exit 1; done

# The site, with executed notebooks, in build/site: open build/site/index.html.
docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# Ten thousand damaged files for every reader, by hypothesis and by atheris (coverage-guided).
fuzz: $(STAMP)
	$(BIN)/pip install --quiet -c constraints.txt -e ".[fuzz]"
	mkdir -p results/fuzz
	for target in extxyz config checkpoint campaign; do \
	  $(BIN)/python -W ignore tests/fuzzing.py --inputs 10000 --target $$target \
	    --output results/fuzz/$$target.json || exit 1; \
	  $(BIN)/python -W ignore tests/guided_fuzzing.py --inputs 10000 --target $$target \
	    --output results/fuzz/$$target-guided.json || exit 1; done

# Change the code in one place at a time: which changes do the tests not notice?
mutants: $(STAMP)
	$(BIN)/python tests/mutation.py --mutants 12 --output results/mutants.json

# Hours of use in minutes: memory, killed workers, threads and processes, full disks (needs root).
soak: $(STAMP)
	$(BIN)/python -W ignore tests/soak.py --output results/soak.json

# Licences of all dependencies, and known weaknesses where the index of them can be reached.
audit: $(STAMP)
	$(BIN)/python recipes/list_dependencies.py --output docs/dependencies.md
	test -x .venv-audit/bin/pip-audit || { $(PYTHON) -m venv .venv-audit && .venv-audit/bin/pip install --quiet pip-audit; }
	.venv-audit/bin/pip-audit --strict --requirement constraints.txt --no-deps --disable-pip

# torch first and pinned: an open version would pull in a CUDA build of several gigabytes.
BUILT_FROM := pyproject.toml setup.py src/blips/backbones/messages.c

$(STAMP): $(BUILT_FROM) constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet -c constraints.txt torch
	$(BIN)/pip install --quiet -c constraints.txt -e ".[dft,active,test,lint,dist,docs,chgnet,sevennet,orb,mattersim-lean,torchsim,lammps,ipi,ani,properties]"
	$(BIN)/pip install --quiet -c constraints.txt --no-deps mattersim schnetpack
	$(BIN)/pip install --quiet -c constraints.txt --no-deps bayesian-torch blitz-bayesian-pytorch
	$(BIN)/python recipes/fetch_weights.py mattersim-1m
	touch $(STAMP)

$(MACE_STAMP): $(BUILT_FROM) constraints-mace.txt
	test -x $(MACE_BIN)/python || $(PYTHON) -m venv .venv-mace
	$(MACE_BIN)/pip install --quiet -c constraints-mace.txt torch
	$(MACE_BIN)/pip install --quiet -c constraints-mace.txt mace-torch -e ".[test]"
	$(MACE_BIN)/python recipes/fetch_weights.py mace-omat-0-small
	touch $(MACE_STAMP)

clean:
	rm -rf .venv .venv-mace .venv-audit build dist .pytest_cache .ruff_cache src/blips/backbones/_messages*.so
