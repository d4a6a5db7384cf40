"""Documents → rows of tokens, ready for training, and the format they are stored in.

A row is `[CLS] … [SEP]` without padding, in an MDS column `tokens` of the narrowest unsigned integers that hold the
vocabulary. There are two ways to make rows of at most N tokens:

`--max_seq_len N`: one row per document, `[CLS] document [SEP]`, truncated to N.

`--concat_tokens N`: documents end to end, none truncated. Every row but a split's last one has N tokens. A document
ends with `[SEP]`; one that reaches the end of its row continues after the next row's `[CLS]`. If its `[SEP]` falls on
the second-to-last position, the row ends with a second `[SEP]` of the same document. A second column `begins` holds the
positions in the row of each document's first token. It is never empty: a row in which no document starts stores its own
length. So the number of a token's document within its row is the number of entries of `begins` that are at most
the token's position, and `[CLS]`, at position 0, belongs to the document of the token after it.

split.json, next to a split's index.json, is its summary; for rows of tokens it has
`"tokens": {"tokenizer": …, "vocab_size": …, "digest": …, "mode": "max_seq_len" | "concat_tokens", "length": N, …}`.
"""

import itertools
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from tokenizers import Tokenizer

from src.data.tokenizers import vocabulary_digest
from src.errors import UserError
from src.files import sha256

if TYPE_CHECKING:  # takes seconds to import, and the processes that make rows do not need it
    from transformers import PreTrainedTokenizerBase


@dataclass
class Rows:
    """Tokenized documents: rows of `--max_seq_len`, or documents each with its [SEP], to be packed."""

    tokens: np.ndarray  # (all tokens,), end to end
    lengths: np.ndarray  # (documents,), of each document in `tokens`
    content: np.ndarray  # (documents,), tokens in each text, including truncated ones

    def first(self, documents: int) -> "Rows":
        lengths = self.lengths[:documents]
        return Rows(self.tokens[: lengths.sum()], lengths, self.content[:documents])

    def cut_off(self, room: int) -> int:
        """Return the number of tokens beyond the first `room` of each document."""
        return int(np.maximum(self.content - room, 0).sum())


@dataclass
class RowMaker:
    """Texts → rows, for a fixed tokenizer and length. Pickled for other processes."""

    mode: str  # max_seq_len or concat_tokens
    length: int
    cls: int
    sep: int
    vocab_size: int
    tokenizer: Tokenizer | None = None
    tokenizer_digest: str = ""  # of tokenizer.json, compared when a conversion resumes
    summary: dict[str, Any] = field(default_factory=dict)  # for split.json

    @classmethod
    def of(cls, tokenizer: "PreTrainedTokenizerBase", mode: str, length: int) -> "RowMaker":
        """Return the row maker for a tokenizer. Raises UserError unless it frames a text as [CLS] … [SEP]."""
        name, start, end = tokenizer.name_or_path, tokenizer.cls_token_id, tokenizer.sep_token_id
        if not tokenizer.is_fast:
            raise UserError(f"--tokenizer: {name} has no tokenizer.json, and is too slow without it; choose another")
        framed, bare = (tokenizer("a", add_special_tokens=special)["input_ids"] for special in (True, False))
        if None in (start, end) or framed != [start, *bare, end]:
            fix = "choose one like BERT's, or omit --tokenizer"
            raise UserError(f"--tokenizer: {name} does not frame a text as [CLS] … [SEP], which token rows need; {fix}")
        serialized, digest = tokenizer.backend_tokenizer.to_str(), vocabulary_digest(tokenizer)
        summary = {"tokenizer": name, "vocab_size": len(tokenizer), "digest": digest, "mode": mode, "length": length}
        fast = Tokenizer.from_str(serialized)
        fast.no_truncation()
        fast.no_padding()
        return cls(mode, length, start, end, len(tokenizer), fast, sha256([serialized.encode()]), summary)

    @property
    def dtype(self) -> np.dtype:
        return next(t for t in map(np.dtype, ("uint8", "uint16", "uint32")) if self.vocab_size - 1 <= np.iinfo(t).max)

    @property
    def begins_dtype(self) -> np.dtype:
        return np.dtype("uint16" if self.length <= np.iinfo("uint16").max else "uint32")

    @property
    def columns(self) -> dict[str, str]:
        """The columns of the shards, in MDS's encodings."""
        columns = {"tokens": f"ndarray:{self.dtype}"}
        return columns if self.mode == "max_seq_len" else {**columns, "begins": f"ndarray:{self.begins_dtype}"}

    def __call__(self, texts: list[str]) -> Rows:
        """Return the rows of texts; a text without tokens gives an empty row."""
        documents = [encoding.ids for encoding in self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)]
        if self.mode == "max_seq_len":
            rows = [[self.cls, *ids[: self.length - 2], self.sep] if ids else [] for ids in documents]
        else:
            rows = [[*ids, self.sep] if ids else [] for ids in documents]
        lengths = np.fromiter(map(len, rows), np.int64, len(rows))
        tokens = np.fromiter(itertools.chain.from_iterable(rows), self.dtype, lengths.sum())
        return Rows(tokens, lengths, np.fromiter(map(len, documents), np.int64, len(rows)))

    def samples(self, rows: Rows) -> Iterator[dict[str, bytes]]:
        """Yield the samples of `--max_seq_len`, one per document."""
        for end, length in zip(np.cumsum(rows.lengths).tolist(), rows.lengths.tolist()):
            yield {"tokens": encode(rows.tokens[end - length : end])}


def encode(array: np.ndarray) -> bytes:
    """Encode a one-dimensional array as MDS's `ndarray:TYPE`; the library's encoder takes twenty times as long."""
    width = next(i for i in range(4) if len(array) < 1 << (8 << i))  # of the number of elements: 1, 2, 4 or 8 bytes
    return bytes([1 << 2 | width]) + len(array).to_bytes(1 << width, sys.byteorder) + array.tobytes()


class Packer:
    """Documents end to end → the samples of `--concat_tokens`. Tokens that do not fill a row wait for more."""

    def __init__(self, maker: RowMaker, state: dict[str, list[int]] | None = None):
        self.maker = maker
        self.waiting = np.array(state["tokens"] if state else [], maker.dtype)
        self.starts = np.array(state["starts"] if state else [], np.int64)  # of documents, in `waiting`

    def state(self) -> dict[str, list[int]]:
        """Return the state that another Packer resumes from, JSON-serializable."""
        return {"tokens": self.waiting.tolist(), "starts": self.starts.tolist()}

    def samples(self, rows: Rows) -> Iterator[dict[str, bytes]]:
        """Yield the samples that these documents complete. Exhaust it before the next call."""
        maker = self.maker
        starts = np.concatenate([self.starts, len(self.waiting) + np.cumsum(rows.lengths) - rows.lengths])
        tokens = np.concatenate([self.waiting, rows.tokens])
        closing = np.zeros(len(tokens) + 1, bool)  # where a document has its [SEP]
        closing[starts - 1] = True  # before each document; at the end for the first
        closing[len(tokens) - 1] = True
        cuts = self._cuts(len(tokens), closing.tobytes())
        bounds = np.searchsorted(starts, cuts)  # of the documents that start in each row
        self.waiting, self.starts = tokens[cuts[-1] :], starts[bounds[-1] :] - cuts[-1]
        begins = starts[: bounds[-1]] - np.repeat(cuts[:-1], np.diff(bounds)) + 1
        begins = begins.astype(maker.begins_dtype)
        filled = np.full((len(cuts) - 1, maker.length), maker.sep, maker.dtype)
        filled[:, 0] = maker.cls
        for row, start, end, first, last in zip(filled, cuts, cuts[1:], bounds, bounds[1:]):
            row[1 : end - start + 1] = tokens[start:end]
            yield self._sample(row, begins[first:last])

    def last_sample(self) -> Iterator[dict[str, bytes]]:
        """Yield the waiting tokens, if any, as the split's last sample."""
        if len(self.waiting):
            row = np.insert(self.waiting, 0, self.maker.cls)
            yield self._sample(row, (self.starts + 1).astype(self.maker.begins_dtype))

    def _cuts(self, size: int, closing: bytes) -> list[int]:
        """Return the bounds of rows: after N - 1 tokens if the last is a [SEP], else after N - 2 to append one."""
        room = self.maker.length - 2
        cuts = [0]
        while (end := cuts[-1] + room) < size:
            cuts.append(end + closing[end])
        return cuts

    def _sample(self, row: np.ndarray, begins: np.ndarray) -> dict[str, bytes]:
        if not len(begins):  # MDS stores no empty array
            begins = np.array([len(row)], begins.dtype)
        return {"tokens": encode(row), "begins": encode(begins)}
