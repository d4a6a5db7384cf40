"""Documents → rows of tokens, ready for training, and the format they are stored in.

A row is `[CLS] … [SEP]`, in an MDS column `tokens` of the narrowest unsigned integers that hold the vocabulary, without
padding. There are two ways to make rows of at most N tokens:

`--max_seq_len N`: a row a document, `[CLS] document [SEP]`; what is longer than N is cut off.

`--concat_tokens N`: documents end to end, nothing cut off. Every row but a split's last one has N tokens. A document ends
with `[SEP]`; one that reaches the end of its row goes on after the next row's `[CLS]`. A row whose place before the last is
taken by a document's `[SEP]` ends with a second one, the same document's. A second column `begins` has the places in the row
where documents begin, each that of a document's first token. It is never empty: a row in which no document begins has its
own length there. So the document that a token belongs to, numbered within its row, is the number of entries of `begins`
that are at most the token's place, and `[CLS]`, at place 0, goes with the token after it.

Beside a split's index.json lies split.json, its summary; for rows of tokens with
`"tokens": {"tokenizer": …, "vocab_size": …, "digest": …, "mode": "max_seq_len" or "concat_tokens", "length": N, …}`.
"""

import hashlib
import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # transformers takes seconds to import, and the processes that make rows need none of it
    from transformers import PreTrainedTokenizerBase


def vocabulary_digest(tokenizer: "PreTrainedTokenizerBase") -> str:
    """SHA-256, in hexadecimal, of every token with its id, and of the ids that frame, pad and mask: what rows depend on."""
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    special = [getattr(tokenizer, f"{name}_token_id") for name in ("cls", "sep", "pad", "mask")]
    return hashlib.sha256(json.dumps([vocabulary, special]).encode()).hexdigest()
