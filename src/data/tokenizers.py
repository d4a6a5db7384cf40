"""Train a lower-case WordPiece tokenizer, BERT's, on text of one's own.

    python src/train_tokenizer.py --data_files 'corpus/*.jsonl' --vocab_size 8192 --out my-tokenizer

The folder it writes loads with `AutoTokenizer.from_pretrained("my-tokenizer")` and serves as `tokenizer_name` in a YAML.
The same text and options give the same tokenizer, byte for byte.
"""

import argparse
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import BertTokenizerFast

from src.cli import log, progress
from src.data.readers import STANDARD_INPUT, find_files, read_texts
from src.errors import RunFailed, UserError, first_line
from src.files import check_writable

SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")  # their ids are 0 to 4
MAX_LENGTH = 512


def main(argv: list[str]) -> None:
    args = parse_args(argv)
    files = find_files(args.data_files)
    if STANDARD_INPUT in files:
        raise UserError(
            "--data_files: the text is read twice, and standard input can be read once; write it to a file first"
        )
    check_out(args.out)
    log.info(f"training a WordPiece tokenizer of {args.vocab_size:,} tokens on {len(files):,} file(s), for {args.out}")
    tokenizer = train(files, args.vocab_size, args.text_column, args.lowercase)
    save(tokenizer, args.out, args.lowercase)
    if (size := tokenizer.get_vocab_size()) < args.vocab_size:
        log.warning(f"the text gave {size:,} tokens only, of the {args.vocab_size:,} asked for")
    log.info(f"{args.out}: a tokenizer of {size:,} tokens")


def parse_args(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="train_tokenizer.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--data_files", required=True, nargs="+", metavar="GLOB",
        help="the text: .txt (a document a line), .jsonl, .csv or .tsv, also as .gz or .zst, or .parquet")  # fmt: skip
    add("--out", required=True, type=Path, metavar="DIR", help="the folder to write; it must not hold a tokenizer yet")
    add("--vocab_size", type=int, default=30522, help="tokens, special ones included (default: %(default)s, BERT's)")
    add(
        "--text_column",
        default="text",
        metavar="NAME",
        help="the column or key that holds the text (default: %(default)s)",
    )
    add("--lowercase", action=argparse.BooleanOptionalAction, default=True, help="fold case and strip accents")
    return parser.parse_args(argv)


def check_out(out: Path) -> None:
    """Raise UserError for a folder that cannot be written to, or that holds a tokenizer, before anything is read."""
    check_writable("--out", out)
    if (out / "tokenizer.json").exists():
        raise UserError(f"--out: {out} already holds a tokenizer; give another folder, or remove it first")


def train(files: list[Path], vocab_size: int, text_column: str = "text", lowercase: bool = True) -> Tokenizer:
    """A WordPiece tokenizer with BERT's normalizer, pre-tokenizer and [CLS] A [SEP] B [SEP], learnt from the files."""
    normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    splitter = pre_tokenizers.BertPreTokenizer()
    learner = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    learner.normalizer, learner.pre_tokenizer = normalizer, splitter

    alphabet = set()
    for text in progress(read_all(files, text_column), desc="reading the alphabet", unit="text"):
        alphabet.update(normalizer.normalize_str(text))
    alphabet = sorted(character for character in alphabet if not character.isspace())
    if not alphabet:
        raise UserError(f"--data_files: {files[0]}{' and the others' if files[1:] else ''} hold no text to learn from")
    # The trainer numbers the characters inside words as it meets them, in the random order of a hash map, and breaks
    # ties by those numbers. Numbered beforehand, they give the same tokenizer every time.
    inside = [f"##{character}" for character in alphabet if len(splitter.pre_tokenize_str(f"a{character}")) == 1]
    fewest = len(SPECIAL_TOKENS) + len(inside) + len(alphabet)
    if vocab_size < fewest:
        raise UserError(
            f"--vocab_size: {vocab_size} is too small, for the characters of this text take {fewest} tokens"
        )
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size, special_tokens=[*SPECIAL_TOKENS, *inside], show_progress=sys.stderr.isatty()
    )
    learner.train_from_iterator(read_all(files, text_column), trainer)

    tokenizer = Tokenizer(models.WordPiece(learner.get_vocab(), unk_token="[UNK]"))  # where `inside` is not special
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizer, splitter
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    tokenizer.post_processor = processors.BertProcessing(sep=("[SEP]", 3), cls=("[CLS]", 2))
    return tokenizer


def read_all(files: list[Path], text_column: str) -> Iterator[str]:
    return (text for path in files for text in read_texts(path, text_column))


def save(tokenizer: Tokenizer, out: Path, lowercase: bool) -> None:
    """Write the folder that AutoTokenizer loads: tokenizer.json, vocab.txt and the two small files beside them.

    Raises RunFailed where it cannot be written.
    """
    unfinished = out / ".unfinished"
    fast = BertTokenizerFast(tokenizer_object=tokenizer, do_lower_case=lowercase, model_max_length=MAX_LENGTH)
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        fast.save_pretrained(unfinished)
        # The last makes it whole.
        for file in sorted(unfinished.iterdir(), key=lambda file: file.name == "tokenizer.json"):
            file.replace(out / file.name)
    except Exception as error:  # OSError, or what the tokenizers library makes of one
        reason = getattr(error, "strerror", None) or first_line(error)
        raise RunFailed(f"--out: {out} cannot be written ({reason}); give another folder, or make room") from None
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
