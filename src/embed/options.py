"""Options of the commands that read texts with a model, and the model that they choose. Imports nothing slow."""

from argparse import ArgumentParser, Namespace
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from src.checkpoints.remote import fetch, is_remote
from src.cli import log
from src.config import Rule, check_value
from src.files import file_digest

if TYPE_CHECKING:
    from src.embed.encoder import Encoder

MODEL = "checkpoint of main.py, glue.py or embed.py, Hub folder or name, or any model that sentence-transformers loads"
BM25 = "bm25"  # in place of a model: a ranking by words
READING = ("max_seq_len", "query_prompt", "document_prompt", "precision")  # options that change vectors


def add_reading(parser: ArgumentParser) -> None:
    """Add what `open_model` takes."""
    add = parser.add_argument
    add(
        "--max_seq_len", type=int, help="truncate texts to this many tokens (default: the model's limit, if it has one)"
    )
    add("--query_prompt", help="text before each query (default: the model's own)")
    add("--document_prompt", help="text before each document (default: the model's own)")
    words = "keep the first N numbers of each vector, as for a model with matryoshka_dims (default: all)"
    add("--dims", type=int, metavar="N", help=words)
    add("--batch_tokens", type=int, default=16384, help="tokens per batch (default: 16384)")
    words = "read longer texts in segments of this many tokens: the same result in less memory (default: 65536)"
    add("--segment_length", "--piece_length", type=int, metavar="TOKENS", help=words)
    add("--device", choices=["gpu", "cpu"], help="default: a GPU if there is one")
    add("--precision", choices=["fp32", "bf16"], default="fp32", help="default: fp32")
    add("--trust_remote_code", action="store_true", help="allow a model to run its own code")


def check_counts(options: Namespace, *names: str) -> None:
    """Raise UserError for an option that must be at least 1 and is not."""
    for name in ("max_seq_len", "batch_tokens", "segment_length", "dims", *names):
        least = 3 if name == "max_seq_len" else 1
        check_value(f"--{name}", getattr(options, name), int | None, Rule(at_least=least))


def open_model(model: str, options: Namespace) -> "Encoder":
    """Open a model, and say how it reads. Raises UserError."""
    from src.embed.encoder import DOCUMENT, QUERY, Settings, open_encoder
    from src.lion.cpu import flush_denormals
    from src.lion.machine import keep_freed_memory
    from src.training.trainer import resolve_device, silence_libraries

    silence_libraries()
    flush_denormals()
    keep_freed_memory()  # the next batch requests it again
    prompts = {QUERY: options.query_prompt, DOCUMENT: options.document_prompt}
    settings = Settings(
        limit=options.max_seq_len,
        prompts={kind: text for kind, text in prompts.items() if text is not None},
        device="cuda" if resolve_device(options.device) == "gpu" else "cpu",
        bfloat16=options.precision == "bf16",
        batch_tokens=options.batch_tokens,
        segment_length=options.segment_length,
        trust_remote_code=options.trust_remote_code,
        dims=options.dims,
    )
    encoder = open_encoder(model, settings)
    reads = f"up to {encoder.limit:,} tokens" if encoder.limit else "texts of any length"
    prompts = "".join(f", {kind} prompt {text!r}" for kind, text in sorted(encoder.prompts.items()) if text)
    kept = f", the first {options.dims} numbers of each vector" if options.dims else ""
    log.info(f"{model}: {encoder.title}, {reads}{prompts}{kept}")
    return encoder


def newest_commit(name: str) -> str | None:
    """Return the commit of a model's main branch on the Hub or, offline, in the cache; None if neither has it."""
    if name == BM25 or name.count("/") > 1:
        return None
    from huggingface_hub import HfApi, hf_hub_download

    with suppress(Exception):  # whatever the client raises; opening the model reports it
        return HfApi().model_info(name, timeout=10).sha
    with suppress(Exception):
        return Path(hf_hub_download(name, "config.json", local_files_only=True)).parent.name
    return None


def as_earlier(files: list[list[Any]]) -> list[list[Any]]:
    """Return the files of a fingerprint that earlier versions noted: none below a folder, nor commits on the Hub."""
    return [file for file in files if "/" not in file[0] and file[0] != "commit"]


def fingerprint(model: str, options: Namespace) -> dict[str, Any]:
    """What vectors depend on besides the texts, to recognize them. Raises UserError."""
    path = fetch(model, "MODEL") if is_remote(model) else Path(model)
    # A folder of sentence-transformers has its weights in a folder below; vectors may be written into another there.
    out = getattr(options, "out", None)
    inside = (
        file
        for file in sorted(path.rglob("*.*"))
        if file.is_file() and not (out and file.resolve().is_relative_to(out.resolve()))
    )
    files = [(path.name, path)] if path.is_file() else [(file.relative_to(path).as_posix(), file) for file in inside]
    if is_remote(model):  # a file's time is that of its download
        facts = [[name, file_digest(file)] for name, file in files]
    elif path.exists():
        facts = [[name, file.stat().st_size, file.stat().st_mtime_ns] for name, file in files]
    else:
        facts = [["commit", commit]] if (commit := newest_commit(model)) else []
    given = {} if options.dims is None else {"dims": options.dims}  # which folders of earlier versions do not have
    return {"model": model, "files": facts, **{name: getattr(options, name) for name in READING}, **given}
