# Each target works from a fresh clone. VENV=DIR chooses the folder of the environment.

VENV  ?= .venv
MODEL ?= lion-s-tiny
SEEDS ?= 1
JOBS  ?= 1
# The first Python that the pinned packages support, 3.10 to 3.12; PYTHON=... overrides the search.
PYTHON ?= $(shell for python in python3.11 python3.12 python3.10 python3 python; do \
	command -v $$python >/dev/null 2>&1 && \
	$$python -c 'import sys, venv, ensurepip; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 12))' >/dev/null 2>&1 && \
	echo $$python && break; done)

.PHONY: help demo demo-vision compare compare-vision test test-fast test-compat lint clean

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 20

demo: $(VENV)/installed  ## prepare text, pretrain, fine-tune, export, fill masks and search (MODEL=lion-d-tiny chooses another model)
	$(VENV)/bin/python -m src.demo --model $(MODEL)

compare: $(VENV)/installed  ## compare all mixers, trained for longer than the demo (SEEDS=3 trains each three times, JOBS=2 two at a time)
	$(VENV)/bin/python -m src.demo --compare --seeds $(SEEDS) --jobs $(JOBS) --out demo/compare --train_examples 12000 max_duration=92160sp

demo-vision: $(VENV)/installed  ## train image classifiers on handwritten digits, export one, and draw what it sees
	$(VENV)/bin/python -m src.demo.vision

compare-vision: $(VENV)/installed  ## the same with all eight variants
	$(VENV)/bin/python -m src.demo.vision --compare --out demo-vision/compare

test: $(VENV)/installed  ## run all tests
	$(VENV)/bin/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

test-fast: $(VENV)/installed  ## run the quick tests, in two to five minutes
	$(VENV)/bin/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m "not slow"

test-compat: $(VENV)-compat/installed  ## test the encoder and its Hub folder under the newest torch and transformers
	$(VENV)-compat/bin/python -m pytest tests/test_linear_attention.py tests/test_two_sided_attention.py tests/test_separate_decays.py tests/test_channel_decay.py tests/test_hydra.py tests/test_options.py tests/test_cpu.py tests/test_modeling_lion.py tests/test_losses.py tests/test_custom_operators.py tests/test_state_passing.py tests/test_modeling_lion_embedding.py tests/test_patch_orders.py tests/test_modeling_lion_vision.py tests/test_adapters.py tests/test_folder.py tests/test_embedding_folder.py tests/test_image_folder.py

lint: $(VENV)/installed  ## check style and formatting
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

clean:  ## remove the environments, caches and demo outputs
	rm -rf $(VENV) $(VENV)-compat demo demo-vision demo-mnist .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The file `installed` is newer than the requirements once they are installed.
$(VENV)/installed: requirements.txt
$(VENV)-compat/installed: requirements-compat.txt
$(VENV)/installed $(VENV)-compat/installed:
	@test -n "$(PYTHON)" || { echo "error: no python3 from 3.10 to 3.12 with venv found; install one, or name it: make PYTHON=/path/to/python3.11" >&2; exit 2; }
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --disable-pip-version-check --progress-bar off -r $<
	@touch $@
