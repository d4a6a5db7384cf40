"""Speed and memory, as commands."""

import src  # noqa: F401  it says how torch is to ask for memory, which counts from its first tensor on
