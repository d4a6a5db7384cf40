"""Train text embeddings:  [composer -n N] embed.py FILE.yaml [key=value ...]
Score models at retrieval:  python embed.py evaluate MODEL [MODEL ...] --data DIR [DIR ...]
Encode files of texts:  python embed.py encode MODEL --data_files GLOB --out DIR"""

import sys
from pathlib import Path

from src import cli
from src.embed.config import EmbedConfig
from src.embed.task import Embedding
from src.training.config import load_config
from src.training.run import run

EXAMPLE = "yamls/embed/lion-s-base-pairs.yaml data.pairs.files='pairs/*.jsonl'"


def main(argv: list[str]) -> None:
    if argv[:1] == ["evaluate"]:
        from src.embed.evaluate import evaluate

        return evaluate(argv[1:])
    if argv[:1] == ["encode"]:
        from src.embed.encode import encode

        return encode(argv[1:])
    run(Embedding(load_config(EmbedConfig, "embed.py", EXAMPLE, argv, ("evaluate", "encode"))))


if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent)
    cli.run(main)
