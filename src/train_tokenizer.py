"""Train a WordPiece tokenizer like BERT's on your own text, lower-case by default.

    python src/train_tokenizer.py --data_files 'corpus/*.jsonl' --vocab_size 8192 --out my-tokenizer

The folder it writes loads with `AutoTokenizer.from_pretrained("my-tokenizer")`; set it as `tokenizer_name` in a YAML.
The same text and options give the same tokenizer, byte for byte.
"""

import argparse
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from src.cli import check_alone, log, run
from src.data.readers import STANDARD_INPUT, find_files, read_batches
from src.data.tokenizers import save_tokenizer, train_wordpiece
from src.errors import UserError
from src.files import check_writable


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    kinds = ".txt (one document per line), .jsonl, .csv or .tsv, optionally .gz or .zst, or .parquet"
    add("--data_files", required=True, nargs="+", metavar="GLOB", help=f"the text: {kinds}")
    add("--out", required=True, type=Path, metavar="DIR", help="the folder to write; it must not hold a tokenizer yet")
    add("--vocab_size", type=int, default=30522, help="tokens, special ones included (default: %(default)s, BERT's)")
    add("--text_column", default="text", metavar="NAME", help="column or key with the text (default: %(default)s)")
    add("--lowercase", action=argparse.BooleanOptionalAction, default=True, help="fold case and strip accents")
    args = parser.parse_args(argv)
    check_alone("src/train_tokenizer.py")
    files = find_files(args.data_files)
    if STANDARD_INPUT in files:
        raise UserError("--data_files: the text is read twice, and standard input only once; write it to a file")
    check_writable("--out", args.out)
    if (args.out / "tokenizer.json").exists():
        raise UserError(f"--out: {args.out} already holds a tokenizer; choose another folder, or remove it first")
    log.info(f"training a WordPiece tokenizer of {args.vocab_size:,} tokens on {len(files):,} file(s), for {args.out}")

    def texts():
        return (text for path in files for batch in read_batches(path, args.text_column) for text in batch.texts)

    tokenizer = train_wordpiece(texts, args.vocab_size, args.lowercase)
    save_tokenizer(tokenizer, args.out, args.lowercase)
    if (size := tokenizer.get_vocab_size()) < args.vocab_size:
        log.warning(f"the text gave only {size:,} of {args.vocab_size:,} tokens")
    log.info(f"{args.out}: a tokenizer of {size:,} tokens")


if __name__ == "__main__":
    run(main)
