# Each target works on a fresh machine with Python >= 3.11 and make, and can be
# run again without harm.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# What pip installs. With hashes, for CI:
# make REQUIREMENTS='--require-hashes -r requirements.lock' ...
REQUIREMENTS ?= -r requirements.txt
# Changes of the requirements are installed; otherwise nothing is.
INSTALLED := $(VENV)/.installed
# For the buffers of XLA on CPU: large pages, and memory that is kept instead of
# being given back, and cleared again, every step.
export GLIBC_TUNABLES ?= glibc.malloc.hugetlb=1:glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold=17179869184

.PHONY: help test test-slow lint quickstart

help:
	@echo 'make quickstart  train both kinds of encoder and report (8 minutes on 2 cores)'
	@echo 'make test        run the tests (minutes)'
	@echo 'make test-slow   run the slow tests too'
	@echo 'make lint        check style and format'
	@echo 'Each first installs requirements.txt into $(VENV), once.'

$(INSTALLED): requirements.txt requirements.lock
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo 'Python >= 3.11 is needed; name it with make PYTHON=...'; exit 1; }
	@echo 'Installing $(REQUIREMENTS) into $(VENV) (minutes, once)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check $(REQUIREMENTS)
	@touch $(INSTALLED)

test: $(INSTALLED)
	@echo 'Running the tests, slow ones left out'
	$(BIN)/python -m pytest -n 2 --dist loadfile -m 'not slow'

test-slow: $(INSTALLED)
	@echo 'Running all tests'
	$(BIN)/python -m pytest -n 2 --dist loadfile

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

QUICK_REPORT := runs/quickstart_report

quickstart: $(INSTALLED)
	@echo 'Training the 24-layer encoder twice on the 5,000-image MNIST sample'
	$(BIN)/python -m launch.train --config=configs/mnist_softmax.py:quick
	$(BIN)/python -m launch.train --config=configs/mnist_sinkhorn.py:quick
	[ -e $(QUICK_REPORT)/.finished ] || { rm -rf $(QUICK_REPORT) && \
	  $(BIN)/python -m analysis.report --output=$(QUICK_REPORT) \
	  --workdir=runs/mnist_softmax_quick/seed0 \
	  --workdir=runs/mnist_sinkhorn_quick/seed0 \
	  --num_examples=8 --num_paths=50 --num_draws=20 && \
	  touch $(QUICK_REPORT)/.finished; }
	@echo 'Runs: runs/mnist_softmax_quick/seed0 and runs/mnist_sinkhorn_quick/seed0'
	@echo 'Open $(QUICK_REPORT)/report.html'
