"""Pretrain an encoder as a masked language model:  [composer -n N] main.py FILE.yaml [key=value ...]
Measure whether it uses distant context:  python main.py context MODEL [MODEL ...] --data_files GLOB --out DIR"""

import sys
from pathlib import Path

from src import cli
from src.mlm.task import MaskedLM, PretrainConfig
from src.training.config import load_config
from src.training.run import run

EXAMPLE = "yamls/pretrain/lion-s-base.yaml max_duration=1000ba"


def main(argv: list[str]) -> None:
    if argv[:1] == ["context"]:
        from src.mlm.context import context

        return context(argv[1:])
    run(MaskedLM(load_config(PretrainConfig, "main.py", EXAMPLE, argv, ("context",))))


if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent)
    cli.run(main)
