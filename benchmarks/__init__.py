"""Speed and memory, as commands."""

import os

# As in cli.run, but before the modules of this package import transformers.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
