"""Documents → rows of tokens, ready for training, and the format they are stored in.

A row is `[CLS] … [SEP]`, in an MDS column `tokens` of the narrowest unsigned integers that hold the vocabulary, without
padding. There are two ways to make rows of at most N tokens:

`--max_seq_len N`: a row a document, `[CLS] document [SEP]`; what is longer than N is cut off.

`--concat_tokens N`: documents end to end, nothing cut off. Every row but a split's last one has N tokens. A document ends
with `[SEP]`; one that reaches the end of its row goes on after the next row's `[CLS]`. Where a document's `[SEP]` falls on the
last place but one, the row ends with a second one of the same document. A second column `begins` has the places in the row
where documents begin, each that of a document's first token. It is never empty: a row in which no document begins has its
own length there. So the document that a token belongs to, numbered within its row, is the number of entries of `begins`
that are at most the token's place, and `[CLS]`, at place 0, goes with the token after it.

Beside a split's index.json lies split.json, its summary; for rows of tokens with
`"tokens": {"tokenizer": …, "vocab_size": …, "digest": …, "mode": "max_seq_len" or "concat_tokens", "length": N, …}`.
"""

import itertools
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from tokenizers import Tokenizer

from src.errors import UserError

if TYPE_CHECKING:  # transformers takes seconds to import, and the processes that make rows need none of it
    from transformers import PreTrainedTokenizerBase


@dataclass
class Rows:
    """Documents tokenized: rows of `--max_seq_len`, or documents each with its [SEP] to be packed."""

    tokens: np.ndarray  # (all tokens,), end to end
    lengths: np.ndarray  # (documents,), of each in `tokens`
    content: np.ndarray  # (documents,), tokens of its text, those that were cut off included

    def first(self, documents: int) -> "Rows":
        lengths = self.lengths[:documents]
        return Rows(self.tokens[: lengths.sum()], lengths, self.content[:documents])

    def cut_off(self, room: int) -> int:
        """Tokens of text beyond the first `room` of each document."""
        return int(np.maximum(self.content - room, 0).sum())


@dataclass
class RowMaker:
    """Texts → rows of a fixed tokenizer and length. Goes to other processes by pickle."""

    mode: str  # max_seq_len or concat_tokens
    length: int
    cls: int
    sep: int
    vocab_size: int
    tokenizer_json: str

    @classmethod
    def of(cls, tokenizer: "PreTrainedTokenizerBase", mode: str, length: int) -> "RowMaker":
        """Raises UserError where the tokenizer does not frame a text as [CLS] … [SEP]."""
        if not tokenizer.is_fast:
            raise UserError(f"--tokenizer: {tokenizer.name_or_path} has no tokenizer.json, and is too slow without it")
        framed, bare = (tokenizer("a", add_special_tokens=special)["input_ids"] for special in (True, False))
        if None in (tokenizer.cls_token_id, tokenizer.sep_token_id) or framed != [
            tokenizer.cls_token_id, *bare, tokenizer.sep_token_id
        ]:  # fmt: skip
            raise UserError(f"--tokenizer: {tokenizer.name_or_path} does not frame a text as [CLS] … [SEP], as rows of tokens need it; take one of BERT's kind, or leave --tokenizer out")  # fmt: skip
        return cls(mode, length, tokenizer.cls_token_id, tokenizer.sep_token_id, len(tokenizer), tokenizer.backend_tokenizer.to_str())  # fmt: skip

    @property
    def dtype(self) -> np.dtype:
        return next(t for t in map(np.dtype, ("uint8", "uint16", "uint32")) if self.vocab_size - 1 <= np.iinfo(t).max)

    @property
    def begins_dtype(self) -> np.dtype:
        return np.dtype("uint16" if self.length <= np.iinfo("uint16").max else "uint32")

    @property
    def columns(self) -> dict[str, str]:
        """Of the shards, in MDS's encodings."""
        columns = {"tokens": f"ndarray:{self.dtype}"}
        return columns if self.mode == "max_seq_len" else {**columns, "begins": f"ndarray:{self.begins_dtype}"}

    @cached_property
    def tokenizer(self) -> Tokenizer:
        tokenizer = Tokenizer.from_str(self.tokenizer_json)
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return tokenizer

    def __getstate__(self) -> dict:
        return {name: value for name, value in self.__dict__.items() if name != "tokenizer"}

    def __call__(self, texts: list[str]) -> Rows:
        """The rows of texts. One that has no tokens gives an empty row."""
        documents = [encoding.ids for encoding in self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)]
        if self.mode == "max_seq_len":
            rows = [[self.cls, *ids[: self.length - 2], self.sep] if ids else [] for ids in documents]
        else:
            rows = [[*ids, self.sep] if ids else [] for ids in documents]
        lengths = np.fromiter(map(len, rows), np.int64, len(rows))
        tokens = np.fromiter(itertools.chain.from_iterable(rows), self.dtype, lengths.sum())
        return Rows(tokens, lengths, np.fromiter(map(len, documents), np.int64, len(rows)))

    def samples(self, rows: Rows) -> Iterator[dict[str, bytes]]:
        """The samples of `--max_seq_len`, one a document."""
        for end, length in zip(np.cumsum(rows.lengths).tolist(), rows.lengths.tolist()):
            yield {"tokens": encode(rows.tokens[end - length : end])}


def encode(array: np.ndarray) -> bytes:
    """A one-dimensional array in MDS's encoding `ndarray:TYPE`; the library's encoder takes twenty times as long."""
    width = next(i for i in range(4) if len(array) < 1 << (8 << i))  # of the number of elements: 1, 2, 4 or 8 bytes
    return bytes([1 << 2 | width]) + len(array).to_bytes(1 << width, sys.byteorder) + array.tobytes()


class Packer:
    """Documents, end to end → the samples of `--concat_tokens`. What does not fill a row waits for more."""

    def __init__(self, maker: RowMaker, state: dict[str, list[int]] | None = None):
        self.maker = maker
        self.waiting = np.array(state["tokens"] if state else [], maker.dtype)
        self.starts = np.array(state["starts"] if state else [], np.int64)  # of documents, in `waiting`

    def state(self) -> dict[str, list[int]]:
        """What another Packer goes on from, as JSON holds it."""
        return {"tokens": self.waiting.tolist(), "starts": self.starts.tolist()}

    def samples(self, rows: Rows) -> Iterator[dict[str, bytes]]:
        """The samples that these documents fill. To be exhausted before the next call."""
        maker = self.maker
        starts = np.concatenate([self.starts, len(self.waiting) + np.cumsum(rows.lengths) - rows.lengths])
        tokens = np.concatenate([self.waiting, rows.tokens])
        closing = np.zeros(len(tokens) + 1, bool)  # where a document has its [SEP]
        closing[starts - 1] = True  # before each document; before the very first is the spare place at the end
        closing[len(tokens) - 1] = True
        cuts = self._cuts(len(tokens), closing.tobytes())
        bounds = np.searchsorted(starts, cuts)  # of the documents that begin in each row
        self.waiting, self.starts = tokens[cuts[-1] :], starts[bounds[-1] :] - cuts[-1]
        begins = starts[: bounds[-1]] - np.repeat(cuts[:-1], np.diff(bounds)) + 1
        begins = begins.astype(maker.begins_dtype)
        filled = np.full((len(cuts) - 1, maker.length), maker.sep, maker.dtype)
        filled[:, 0] = maker.cls
        for row, begin, end, first, last in zip(filled, cuts, cuts[1:], bounds, bounds[1:]):
            row[1 : end - begin + 1] = tokens[begin:end]
            yield self._sample(row, begins[first:last])

    def last_sample(self) -> Iterator[dict[str, bytes]]:
        """What waits, as the split's last sample; nothing if nothing waits."""
        if len(self.waiting):
            row = np.insert(self.waiting, 0, self.maker.cls)
            yield self._sample(row, (self.starts + 1).astype(self.maker.begins_dtype))

    def _cuts(self, size: int, closing: bytes) -> list[int]:
        """Where rows begin and end: after N - 1 tokens if the last is a [SEP] already, else after N - 2, to add one."""
        room = self.maker.length - 2
        cuts = [0]
        while (end := cuts[-1] + room) < size:
            cuts.append(end + closing[end])
        return cuts

    def _sample(self, row: np.ndarray, begins: np.ndarray) -> dict[str, bytes]:
        if not len(begins):  # MDS stores no empty array
            begins = np.array([len(row)], begins.dtype)
        return {"tokens": encode(row), "begins": encode(begins)}
