"""Rows of tokens: nothing lost or repeated, and every document recovered, whatever the batches."""

import hashlib
import json
import random

import numpy as np
import pytest
from streaming.base.format.mds.encodings import mds_decode, mds_encode
from transformers import BertTokenizerFast, PreTrainedTokenizerFast

from src.data.token_rows import Packer, RowMaker, encode
from src.data.tokenizers import load_tokenizer, vocabulary_digest
from src.errors import UserError

CLS, SEP = 2, 3


def maker(length: int, mode: str = "concat_tokens", vocab_size: int = 300) -> RowMaker:
    return RowMaker(mode, length, CLS, SEP, vocab_size)


def to_pack(documents: list[list[int]]) -> list[bytes]:
    return [np.array([*ids, SEP], np.uint16).tobytes() for ids in documents]


def pack(length: int, batches: list[list[list[int]]]) -> list[tuple[list[int], list[int]]]:
    """(tokens, begins) of every row, the packer restored from its state before each batch."""
    samples, state = [], None
    for batch in batches:
        packer = Packer(maker(length), state)
        samples += packer.samples(to_pack(batch))
        state = json.loads(json.dumps(packer.state()))
    samples += Packer(maker(length), state).last_sample()
    return [
        tuple(mds_decode("ndarray:uint16", sample[name]).tolist() for name in ("tokens", "begins"))
        for sample in samples
    ]


def unpack(rows: list[tuple[list[int], list[int]]]) -> list[list[int]]:
    """Return the documents: the tokens of the rows grouped by document, without the added special tokens."""
    documents: list[list[int]] = []
    for tokens, begins in rows:
        segments = [[] for _ in range(len(begins) + 1)]
        for position, token in enumerate(tokens[1:], 1):
            segments[sum(begin <= position for begin in begins)].append(token)
        documents[-1:] = [documents[-1] + segments[0]] if documents else []
        documents += [segment for segment in segments[1:] if segment]
    return [[token for token in ids if token != SEP] for ids in documents]


@pytest.mark.parametrize("length", [3, 4, 5, 8, 13, 128])
def test_documents_are_recovered_from_packed_rows(length):
    draw = random.Random(length)
    for _ in range(60):
        sizes = [
            draw.choice([1, 2, length - 3, length - 2, length - 1, 2 * length, draw.randint(1, 40)])
            for _ in range(draw.randint(1, 12))
        ]
        documents = [[draw.randint(5, 299) for _ in range(max(size, 1))] for size in sizes]
        cut = draw.randint(0, len(documents))
        rows = pack(length, [documents[:cut], documents[cut:]])
        assert unpack(rows) == documents
        assert rows == pack(length, [documents])
        for tokens, begins in rows:
            assert tokens[0] == CLS and tokens[-1] == SEP and len(tokens) > 2 and tokens[1] != SEP
            assert begins and begins == sorted(set(begins))
            assert all(
                tokens[begin] != SEP and tokens[begin - 1] in (CLS, SEP) for begin in begins if begin < len(tokens)
            )
        assert [len(tokens) for tokens, _ in rows[:-1]] == [length] * (len(rows) - 1)
        assert len(rows[-1][0]) <= length


PACKED = {
    "shorter than a row": ([[7, 8]], [([2, 7, 8, 3], [1])]),
    "two in a row": ([[7, 8], [9]], [([2, 7, 8, 3, 9, 3], [1, 4])]),
    "over three rows": (
        [[5, 6, 7, 8, 9, 10, 11, 12, 13]],
        [([2, 5, 6, 7, 8, 3], [1]), ([2, 9, 10, 11, 12, 3], [6]), ([2, 13, 3], [3])],
    ),
    "an end that is the row's": ([[5, 6, 7, 8], [9]], [([2, 5, 6, 7, 8, 3], [1]), ([2, 9, 3], [1])]),
    "an end one position before the row's": ([[5, 6, 7], [9]], [([2, 5, 6, 7, 3, 3], [1]), ([2, 9, 3], [1])]),
    "a start on the last position for text": (
        [[5, 6], [9, 10]],
        [([2, 5, 6, 3, 9, 3], [1, 4]), ([2, 10, 3], [3])],
    ),
}


@pytest.mark.parametrize("documents, rows", PACKED.values(), ids=PACKED.keys())
def test_rows_of_six_have_the_documented_layout(documents, rows):
    assert pack(6, [documents]) == rows


@pytest.mark.parametrize("size", [1, 2, 255, 256, 65535, 65536])
@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32"])
def test_arrays_are_stored_as_the_library_stores_them(size, dtype):
    array = np.arange(size).astype(dtype)
    assert encode(array) == mds_encode(f"ndarray:{dtype}", array)


@pytest.mark.parametrize("vocab_size, dtype", [(256, "uint8"), (257, "uint16"), (65536, "uint16"), (65537, "uint32")])
def test_tokens_take_the_narrowest_type_that_holds_the_vocabulary(vocab_size, dtype):
    assert maker(8, vocab_size=vocab_size).columns == {"tokens": f"ndarray:{dtype}", "begins": "ndarray:uint16"}
    assert maker(8, "max_seq_len", vocab_size).columns == {"tokens": f"ndarray:{dtype}"}
    assert maker(65536).columns["begins"] == "ndarray:uint32"


def test_rows_of_max_seq_len_are_the_tokenizers_own(tokenizer):
    from conftest import sentences

    texts = ["", "the dog", "[SEP] and [MASK]", " \x00 ", *sentences(60)]
    rows, counts = RowMaker.of(tokenizer, "max_seq_len", 12)(texts)
    expected = tokenizer(texts, truncation=True, max_length=12)["input_ids"]
    assert [mds_decode("ndarray:uint8", row).tolist() if row else [CLS, SEP] for row in rows] == expected
    assert counts.tolist() == [len(ids) - 2 for ids in tokenizer(texts)["input_ids"]]


def test_padding_and_truncation_of_the_tokenizer_are_ignored(tokenizer):
    other = BertTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer)
    other.backend_tokenizer.enable_truncation(4)
    other.backend_tokenizer.enable_padding(length=9)
    (tokens,), counts = RowMaker.of(other, "concat_tokens", 8)(["the dog sees a cat and a bird"])
    assert counts.tolist() == [8] and len(tokens) == 9


def test_the_digest_covers_tokens_ids_and_special_tokens(tokenizer, tokenizer_folder):
    listed = sorted(([token, id] for token, id in tokenizer.get_vocab().items()), key=lambda pair: pair[1])
    assert vocabulary_digest(tokenizer) == hashlib.sha256(json.dumps([listed, [2, 3, 0, 4]]).encode()).hexdigest()
    assert vocabulary_digest(load_tokenizer(str(tokenizer_folder))) == vocabulary_digest(tokenizer)
    larger = load_tokenizer(str(tokenizer_folder))
    larger.add_tokens(["dragon"])
    masked = load_tokenizer(str(tokenizer_folder))
    masked.mask_token = "[UNK]"
    assert len({vocabulary_digest(each) for each in (tokenizer, larger, masked)}) == 3


def test_a_tokenizer_without_cls_and_sep_is_refused(tokenizer):
    bare = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer)
    with pytest.raises(UserError, match=r"--tokenizer.*\[CLS\]"):
        RowMaker.of(bare, "concat_tokens", 128)


def test_what_a_folder_of_a_tokenizer_lacks_is_named(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "tokenizer_config.json").rename(tmp_path / "kept")
    with pytest.raises(UserError, match=r"tokenizer_config.json is missing .*; write the folder with save_pretrained"):
        load_tokenizer(str(tmp_path))
    (tmp_path / "kept").rename(tmp_path / "tokenizer_config.json")
    (tmp_path / "tokenizer.json").write_bytes((tmp_path / "tokenizer.json").read_bytes()[:100])
    with pytest.raises(UserError, match="its files are unusable"):
        load_tokenizer(str(tmp_path))


def test_a_missing_tokenizer_is_named(tmp_path):
    with pytest.raises(UserError, match=r"--tokenizer: cannot load .*holds no tokenizer"):
        load_tokenizer(str(tmp_path))
    (tmp_path / "vocab.txt").write_text("[PAD]\n[UNK]\n")
    with pytest.raises(UserError, match=r"holds no tokenizer \(Unrecognized model in [^ ]+\); give a folder"):
        load_tokenizer(str(tmp_path))
