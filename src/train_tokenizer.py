"""Train a WordPiece tokenizer. See src/data/tokenizers.py."""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from src import cli
    from src.data.tokenizers import main

    cli.run(main)
