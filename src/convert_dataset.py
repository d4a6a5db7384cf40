"""Write text as MDS shards. See src/data/convert.py."""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from src import cli
    from src.data.convert import main

    cli.run(main)
