"""Speed and memory, as commands."""

from src.cli import use_large_pages

use_large_pages()  # before the modules of this package import transformers, as commands do
