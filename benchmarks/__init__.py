"""Speed and memory, as commands."""

import os

os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # as src/cli.py, before the modules of this package import transformers, as commands do
