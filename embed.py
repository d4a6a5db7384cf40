"""Score models at retrieval:  python embed.py evaluate MODEL [MODEL ...] --data DIR [DIR ...]"""

import sys
from pathlib import Path

from src import cli
from src.embed.evaluate import evaluate
from src.errors import UserError

USAGE = "usage: embed.py evaluate MODEL [MODEL ...] --data DIR [DIR ...]; --help lists the options"


def main(argv: list[str]) -> None:
    if argv[:1] == ["evaluate"]:
        return evaluate(argv[1:])
    if argv[:1] in (["-h"], ["--help"]):
        return print(f"{__doc__}\n\n{USAGE}")
    raise UserError(USAGE)


if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent)
    cli.run(main)
