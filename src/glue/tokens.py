"""A task's examples as tokens. The command tokenizes each task once, before its jobs start, and keeps the tokens in its
save_folder; jobs map the file into memory, which they share. A job that cannot read it tokenizes for itself."""

import json
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tokenizers
import torch
import transformers
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase

from src.cli import log, progress
from src.data.tokenizers import tokenizer_digest
from src.errors import reason
from src.files import sha256, write_atomically
from src.glue.examples import Data, Example, read_task, texts_digest
from src.glue.tasks import SPLITS, FinetuneConfig, Task

FORMAT = 2  # raise it if the same examples give another file
GROUP = 128  # texts to tokenize at a time; more do not fit into a core's cache


class Kept(NamedTuple):
    path: Path
    digest: str  # of all that the tokens depend on


class Tokens(Dataset):
    """The tokenized examples of a split. Its items are what DataCollatorWithPadding takes.

    `tensors` has input_ids and, from some tokenizers, token_type_ids, (tokens,), int32, of all examples end to end;
    `ends`, (examples + 1,): example i has the tokens from ends[i] to ends[i + 1]; `characters`, (examples,), of the
    texts; `truncated`, (examples,), whether they were longer than the maximum; and, unless it is a test set, `labels`,
    (examples,): class numbers, int64, or values, float64."""

    def __init__(self, tensors: dict[str, Tensor], ids: list[int | str], texts: str):
        self.tensors, self.ids = tensors, ids  # ids: see Example
        self.texts = texts  # their digest
        self.labels, self.characters, self.ends = tensors.get("labels"), tensors["characters"], tensors["ends"]
        others = ("labels", "characters", "ends", "truncated")
        self.columns = {name: tensor for name, tensor in tensors.items() if name not in others}

    @property
    def lengths(self) -> list[int]:
        return self.characters.tolist()

    def truncation(self, max_seq_len: int) -> str | None:
        """Return in words how many training texts were truncated, or None if hardly any was."""
        share = self.tensors["truncated"].double().mean().item()
        return f"{share:.1%} of the training texts truncated to {max_seq_len} tokens" if share >= 0.0005 else None

    def __len__(self) -> int:
        return len(self.characters)

    def __getitem__(self, number: int) -> dict[str, Any]:
        start, end = self.ends[number : number + 2].tolist()
        item: dict[str, Any] = {name: column[start:end].tolist() for name, column in self.columns.items()}
        return item if self.labels is None else {**item, "label": self.labels[number].item()}


def keep(data: Data, tokenizer: PreTrainedTokenizerBase, config: FinetuneConfig, path: Path) -> Kept:
    """Tokenize a task's examples into a file, unless it has their tokens already. A failed write is only reported."""
    libraries = tokenizers.__version__, transformers.__version__
    parts = [FORMAT, libraries, tokenizer_digest(tokenizer), data.task.max_seq_len, data.task.kind, data.task.labels]
    rows = [[kind, name, [[e.texts, e.label, e.id] for e in examples]] for kind, name, examples in _splits(data)]
    kept = Kept(path, sha256([json.dumps([parts, rows]).encode()]))
    if _load(kept, data.task) is not None:
        return kept
    tokens = tokenize(data, tokenizer, data.task.max_seq_len, config.progress_bar)
    if note := tokens.train.truncation(data.task.max_seq_len):
        log.info(f"{data.task.title}: {note}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, _serialized(tokens, kept.digest))
    except OSError as error:
        log.warning(f"cannot write {path} ({reason(error)}); each job of {data.task.title} tokenizes its examples")
    return kept


def read(kept: Kept, task: Task, tokenizer: PreTrainedTokenizerBase, config: FinetuneConfig) -> Data:
    """Return a task's tokens from its file, or else tokenize its examples. Raises UserError like `read_task`."""
    if (data := _load(kept, task)) is not None:
        return data
    log.warning(f"{kept.path} is missing or corrupt; tokenizing {task.title}")
    return tokenize(read_task(task, config.glue_dir, config.predict_test), tokenizer, task.max_seq_len)


def tokenize(data: Data, tokenizer: PreTrainedTokenizerBase, max_seq_len: int, show_progress: bool = False) -> Data:
    """Return the data with Tokens instead of lists of examples, each truncated to `max_seq_len`."""
    splits = _splits(data)
    total = sum(len(examples) for *_, examples in splits)
    # A bar appears only if it takes longer than three seconds.
    with progress(total=total, desc=f"tokenizing {data.task.title}", unit=" examples", delay=3, leave=False) as bar:

        def split(examples: list[Example]) -> Tokens:
            columns: dict[str, list[np.ndarray]] = {}
            counts: list[int] = []
            truncated: list[bool] = []
            for start in range(0, len(examples), GROUP):
                group = examples[start : start + GROUP]
                texts = map(list, zip(*(example.texts for example in group)))
                encoded = tokenizer(*texts, truncation=True, max_length=max_seq_len, return_attention_mask=False)
                counts += map(len, encoded["input_ids"])
                if tokenizer.is_fast:
                    truncated += (bool(each.overflowing) for each in encoded.encodings)
                else:  # which do not say
                    truncated += (len(ids) == max_seq_len for ids in encoded["input_ids"])
                for name, rows in encoded.items():
                    columns.setdefault(name, []).append(np.fromiter(chain.from_iterable(rows), np.int32))
                if show_progress:
                    bar.update(len(group))
            tensors = {name: torch.from_numpy(np.concatenate(parts)) for name, parts in columns.items()}
            tensors["ends"] = torch.tensor([0, *counts]).cumsum(0)
            tensors["characters"] = torch.tensor([sum(map(len, example.texts)) for example in examples])
            tensors["truncated"] = torch.tensor(truncated)
            labels = [example.label for example in examples]
            if labels[0] is not None:
                tensors["labels"] = torch.tensor(labels, dtype=torch.float64 if data.task.regression else torch.int64)
            return Tokens(tensors, [example.id for example in examples], texts_digest(examples))

        return _joined(data.task, [(kind, name, split(examples)) for kind, name, examples in splits])


def _splits(data: Data) -> list[tuple[str, str, Any]]:
    """Return (kind, name, examples or tokens) of each split."""
    named = {"train": {"train": data.train}, "validation": data.validation, "test": data.test}
    return [(kind, name, split) for kind, splits in named.items() for name, split in splits.items()]


def _joined(task: Task, splits: list[tuple[str, str, Tokens]]) -> Data:
    """Return data from its `_splits`."""
    named: dict[str, dict[str, Tokens]] = {kind: {} for kind in SPLITS}
    for kind, name, tokens in splits:
        named[kind][name] = tokens
    return Data(task, named["train"]["train"], named["validation"], named["test"])


def _serialized(data: Data, digest: str) -> bytes:
    """Return data in the format of safetensors, with digests of what it depends on and of its content."""
    splits = _splits(data)
    tensors = {f"{i}.{name}": tensor for i, (*_, split) in enumerate(splits) for name, tensor in split.tensors.items()}
    about = json.dumps([data.task.labels, [[kind, name, split.ids, split.texts] for kind, name, split in splits]])
    return save(tensors, {"digest": digest, "about": about, "content": _digest(about, tensors)})


def _load(kept: Kept, task: Task) -> Data | None:
    """Return what is kept, mapped into memory; None if it is missing, corrupt or of other examples or tokens."""
    try:
        with safe_open(kept.path, "pt") as file:
            metadata = file.metadata() or {}
            if metadata["digest"] != kept.digest:
                return None
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        if metadata["content"] != _digest(metadata["about"], tensors):
            return None
    except (OSError, SafetensorError, KeyError):
        return None
    labels, splits = json.loads(metadata["about"])
    named = [{n.partition(".")[2]: t for n, t in tensors.items() if n.startswith(f"{i}.")} for i in range(len(splits))]
    joined = [(kind, name, Tokens(found, ids, texts)) for found, (kind, name, ids, texts) in zip(named, splits)]
    return _joined(replace(task, labels=tuple(labels)), joined)


def _digest(about: str, tensors: dict[str, Tensor]) -> str:
    parts = [about.encode()]
    for name, tensor in sorted(tensors.items()):
        parts += [f"{name} {tensor.dtype} {len(tensor)}".encode(), tensor.numpy()]
    return sha256(parts)
