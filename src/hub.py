"""Export, verify, push or import a Hub folder. See src/publish/commands.py."""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from src import cli
    from src.publish.commands import main

    cli.run(main)
