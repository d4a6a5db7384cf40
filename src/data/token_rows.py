"""Documents → rows of tokens, ready for training, and the format they are stored in.

A row is `[CLS] … [SEP]` without padding, in an MDS column `tokens` of the narrowest unsigned integers that hold the
vocabulary. `--max_seq_len N` makes one row per document, `[CLS] document [SEP]`, truncated to N.

`--concat_tokens N` puts documents, each ending with `[SEP]`, end to end in rows of N tokens; the last row of a unit of
the source (src/data/corpora.py) may be shorter. A document that reaches the end of its row continues after the next
row's `[CLS]`; if its `[SEP]` falls on the second-to-last position, the row ends with a second one. A column `begins`
holds the positions in the row of each document's first token, or, since it is never empty, the row's length if no
document starts there. So the number of a token's document within its row is the number of entries of `begins` up to
its position. `[CLS]` belongs to the document of the token after it.

`token_rows` makes rows of another kind, for measurements.

split.json, next to a split's index.json, is its summary; for rows of tokens it has
`"tokens": {"tokenizer": …, "vocab_size": …, "digest": …, "mode": "max_seq_len" | "concat_tokens", "length": N, …}`.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from tokenizers import Tokenizer

from src.data.tokenizers import frames_texts, vocabulary_digest
from src.errors import UserError
from src.files import sha256

if TYPE_CHECKING:  # takes seconds to import, and the processes that make rows do not need it
    from transformers import PreTrainedTokenizerBase


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
    def of(cls, tokenizer: "PreTrainedTokenizerBase", mode: str, length: int, key: str = "--tokenizer") -> "RowMaker":
        """Return the row maker for a tokenizer. Raises UserError unless it frames a text as [CLS] … [SEP]. `key` is
        what the user set to get rows of tokens."""
        name = tokenizer.name_or_path
        if not tokenizer.is_fast:
            raise UserError(f"{key}: {name} has no tokenizer.json, and is too slow without it; choose another")
        if not frames_texts(tokenizer):
            fix = f"choose one like BERT's, or omit {key}"
            raise UserError(f"{key}: {name} does not frame a text as [CLS] … [SEP], which token rows need; {fix}")
        serialized, digest = tokenizer.backend_tokenizer.to_str(), vocabulary_digest(tokenizer)
        summary = {"tokenizer": name, "vocab_size": len(tokenizer), "digest": digest, "mode": mode, "length": length}
        fast = Tokenizer.from_str(serialized)
        fast.no_truncation()
        fast.no_padding()
        ids = tokenizer.cls_token_id, tokenizer.sep_token_id
        return cls(mode, length, *ids, len(tokenizer), fast, sha256([serialized.encode()]), summary)

    def __post_init__(self):
        self.dtype = np.min_scalar_type(self.vocab_size - 1)
        self.begins_dtype = np.dtype("uint16" if self.length < 1 << 16 else "uint32")
        self.columns = {"tokens": f"ndarray:{self.dtype}"}  # of the shards, in MDS's encodings
        if self.mode == "concat_tokens":
            self.columns["begins"] = f"ndarray:{self.begins_dtype}"

    def __call__(self, texts: list[str]) -> tuple[list[bytes], np.ndarray]:
        """Return what each text becomes, b"" if it has no tokens, and the number of its tokens before truncation. With
        `--max_seq_len`, it becomes its row as MDS stores it; with `--concat_tokens`, its tokens and [SEP]."""
        rows = []
        documents = [encoding.ids for encoding in self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)]
        for ids in documents:
            if self.mode == "concat_tokens":
                row = np.array([*ids, self.sep], self.dtype).tobytes()
            else:
                row = encode(np.array([self.cls, *ids[: self.length - 2], self.sep], self.dtype))
            rows.append(row if ids else b"")
        return rows, np.fromiter(map(len, documents), np.int64, len(documents))


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

    def samples(self, documents: list[bytes]) -> Iterator[dict[str, bytes]]:
        """Yield the samples that these documents complete. Exhaust it before the next call."""
        maker = self.maker
        parts = [self.waiting, *(np.frombuffer(document, maker.dtype) for document in documents)]
        starts, tokens = np.cumsum([len(part) for part in parts])[:-1], np.concatenate(parts)
        starts = np.concatenate([self.starts, starts])
        ends_here = np.zeros(len(tokens) + 1, bool)  # whether a token is a document's [SEP]
        ends_here[starts - 1] = True  # before each document; at the end for the first
        ends_here[len(tokens) - 1] = True
        ends_here, cuts = ends_here.tobytes(), [0]
        while (end := cuts[-1] + maker.length - 2) < len(tokens):
            cuts.append(end + ends_here[end])  # after N - 1 tokens if the last is a [SEP], else N - 2 to append one
        bounds = np.searchsorted(starts, cuts)  # of the documents that start in each row
        self.waiting, self.starts = tokens[cuts[-1] :], starts[bounds[-1] :] - cuts[-1]
        filled = np.full((len(cuts) - 1, maker.length), maker.sep, maker.dtype)
        filled[:, 0] = maker.cls
        for row, start, end, first, last in zip(filled, cuts, cuts[1:], bounds, bounds[1:]):
            row[1 : end - start + 1] = tokens[start:end]
            yield self._sample(row, starts[first:last] - start)

    def last_sample(self) -> Iterator[dict[str, bytes]]:
        """Yield the waiting tokens, if any, as the last sample of a unit; none wait after it."""
        if len(self.waiting):
            yield self._sample(np.insert(self.waiting, 0, self.maker.cls), self.starts)
            self.waiting, self.starts = self.waiting[:0], self.starts[:0]

    def _sample(self, row: np.ndarray, starts: np.ndarray) -> dict[str, bytes]:
        begins = starts + 1 if len(starts) else np.array([len(row)])  # MDS stores no empty array
        return {"tokens": encode(row), "begins": encode(begins.astype(self.maker.begins_dtype))}


def token_rows(texts: Iterator[str], tokenizer: "PreTrainedTokenizerBase", length: int) -> Iterator[list[int]]:
    """Yield rows of this many tokens: the texts end to end, each with its special tokens."""
    row: list[int] = []
    for text in texts:
        row += tokenizer(text)["input_ids"]
        while len(row) >= length:
            yield row[:length]
            row = row[length:]
