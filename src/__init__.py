import os

# Torch's own switch for pages of 2 MB under large tensors on a CPU, read when it makes its first one. With pages of 4 kB, a step on
# a long text spends a good part of its time on having the system clear them (benchmarks/operator.py at 16,384 tokens).
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
