"""Tokenizers: load one, identify its vocabulary, train BERT's WordPiece on a corpus. Imports nothing slow."""

import json
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from src.cli import progress
from src.errors import RunFailed, UserError, first_line, reason
from src.files import sha256

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")  # their ids are 0 to 4
LONGEST_WORD = 100  # characters; WordPiece replaces longer ones by [UNK]


def check_path(name: str, key: str) -> None:
    """Raise UserError if a tokenizer's name is clearly a path and nothing is there. `key` is what the user set."""
    if name.startswith((".", "/", "~")) and not Path(name).expanduser().exists():
        raise UserError(f"{key}: {name} does not exist; give a folder with tokenizer.json, or a name on the Hub")


def load_tokenizer(name: str | Path, key: str = "--tokenizer", **options: Any) -> "PreTrainedTokenizerBase":
    """Load a tokenizer from a folder or the Hub, without running code from there. `key` is what the user set."""
    check_path(str(name), key)
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(name, trust_remote_code=False, **options)
    except Exception as error:  # whatever transformers, tokenizers and sentencepiece raise
        said = re.split(r"\.? (?:Should have a|You can) ", first_line(error))[0]  # without all of the model types
        found, fix = "not a folder, and not found on the Hub", "give a folder with tokenizer.json"
        if Path(name).is_dir():
            there = [Path(name, f"{file}.json").is_file() for file in ("tokenizer", "tokenizer_config")]
            found = "its files are unusable" if all(there) else "the folder holds no tokenizer"
            if there == [True, False]:
                found, fix = "tokenizer_config.json is missing", "write the folder with save_pretrained of transformers"
        raise UserError(f"{key}: cannot load {name}: {found} ({said}); {fix}") from None


def frames_texts(tokenizer: "PreTrainedTokenizerBase") -> bool:
    """Whether a tokenizer reads a text as [CLS] … [SEP]."""
    framed, bare = (tokenizer("a", add_special_tokens=special)["input_ids"] for special in (True, False))
    ends = tokenizer.cls_token_id, tokenizer.sep_token_id
    return None not in ends and framed == [ends[0], *bare, ends[1]]


def vocabulary_digest(tokenizer: "PreTrainedTokenizerBase") -> str:
    """Return the SHA-256 of what token rows depend on: all tokens with ids, and the ids of CLS, SEP, PAD and MASK."""
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    special = [getattr(tokenizer, f"{name}_token_id") for name in ("cls", "sep", "pad", "mask")]
    return sha256([json.dumps([vocabulary, special]).encode()])


def tokenizer_digest(tokenizer: "PreTrainedTokenizerBase") -> str:
    """Return the SHA-256 of all that the tokens of a text depend on, but for the arguments of a call."""
    if tokenizer.is_fast:
        settings = json.loads(tokenizer.backend_tokenizer.to_str())
        settings |= {"truncation": None, "padding": None}  # of the latest call
    else:
        settings = [type(tokenizer).__name__, vocabulary_digest(tokenizer), tokenizer.init_kwargs]
    also = tokenizer.model_input_names, tokenizer.truncation_side
    return sha256([json.dumps([settings, also], sort_keys=True, default=str).encode()])


def train_wordpiece(read_texts: Callable[[], Iterator[str]], vocab_size: int, lowercase: bool = True) -> "Tokenizer":
    """Train a WordPiece tokenizer like BERT's, byte for byte the same for the same texts. `read_texts` is called twice.
    Raises UserError without text, or if the vocabulary is too small for its characters."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

    normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    splitter = pre_tokenizers.BertPreTokenizer()
    learner = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    learner.normalizer, learner.pre_tokenizer = normalizer, splitter
    characters: set[str] = set()
    for text in progress(read_texts(), desc="reading the alphabet", unit="text"):
        characters.update(text)
    normalized = set(normalizer.normalize_str("".join(sorted(characters))))  # it treats characters one by one
    alphabet = sorted(character for character in normalized if not character.isspace())
    if not alphabet:
        raise UserError("--data_files: there is no text to train on; check the files and --text_column")
    # The trainer numbers characters inside words in the random order of a hash map, and breaks ties by those numbers.
    # Numbered beforehand, they give the same tokenizer every time.
    inside = [f"##{character}" for character in alphabet if len(splitter.pre_tokenize_str(f"a{character}")) == 1]
    smallest = len(SPECIAL_TOKENS) + len(inside) + len(alphabet)
    if vocab_size < smallest:
        raise UserError(f"--vocab_size: {vocab_size} is too small; the characters of this text alone need {smallest}")
    numbered, live = [*SPECIAL_TOKENS, *inside], sys.stderr.isatty()
    trainer = trainers.WordPieceTrainer(vocab_size=vocab_size, special_tokens=numbered, show_progress=live)

    def shortened(text: str) -> str:
        """Without words that are too long: they would not be split, and training takes quadratic time in them."""
        if not re.search(rf"\S{{{LONGEST_WORD + 1}}}", text):
            return text
        words = splitter.pre_tokenize_str(normalizer.normalize_str(text))
        return " ".join(word for word, _ in words if len(word) <= LONGEST_WORD)

    learner.train_from_iterator(map(shortened, read_texts()), trainer)
    tokenizer = Tokenizer(models.WordPiece(learner.get_vocab(), unk_token="[UNK]"))  # where `inside` is not special
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizer, splitter
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    tokenizer.post_processor = processors.BertProcessing(sep=("[SEP]", 3), cls=("[CLS]", 2))
    return tokenizer


def save_tokenizer(tokenizer: "Tokenizer", out: Path, lowercase: bool) -> None:
    """Write a folder that AutoTokenizer loads. Raises RunFailed if it cannot be written."""
    from transformers import BertTokenizerFast

    unfinished = out / ".unfinished"
    fast = BertTokenizerFast(tokenizer_object=tokenizer, do_lower_case=lowercase, model_max_length=512)
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        fast.save_pretrained(unfinished)
        # tokenizer.json last, since it makes the folder a tokenizer.
        for file in sorted(unfinished.iterdir(), key=lambda file: file.name == "tokenizer.json"):
            file.replace(out / file.name)
    except Exception as error:  # OSError, or what the tokenizers library turns it into
        raise RunFailed(f"--out: cannot write {out} ({reason(error)}); free space or give another folder") from None
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
