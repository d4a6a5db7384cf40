"""Masked rows of tokens, cut into pieces that a model reads one by one, and how well it predicts the masked tokens."""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedTokenizerBase

from src.checkpoints.reading import load_all, read_pretrained, weights_digest
from src.cli import progress
from src.data.batches import Masking
from src.data.readers import read_batches
from src.data.token_rows import token_rows
from src.data.tokenizers import load_tokenizer, vocabulary_digest
from src.errors import RunFailed, UserError
from src.files import sha256
from src.lion import LionForMaskedLM
from src.lion.losses import labelled_positions
from src.mlm.task import masked_lm_weights

AT_ONCE = 1024  # masked tokens whose logits are computed together: 125 MB with BERT's vocabulary


@dataclass
class Reading:
    """How pieces are read: on which device, in which precision, and at most how many tokens in a batch, unless a
    single piece is longer."""

    device: str = "cpu"
    bfloat16: bool = False
    batch_tokens: int = 16384


def open_models(
    names: Sequence[str], tokenizer_name: str | None = None
) -> tuple[list[LionForMaskedLM], PreTrainedTokenizerBase]:
    """Return masked language models and the tokenizer that all of them share. Raises UserError."""
    given = load_tokenizer(tokenizer_name) if tokenizer_name else None
    models, chosen, of = [], given, "--tokenizer"
    for name in names:
        read = read_pretrained(name, "MODEL")
        weights, has_head = masked_lm_weights(read)
        if not has_head:
            raise UserError(f"MODEL: {name} has no masked-language-model head; give a checkpoint of main.py")
        own = read.load_tokenizer()
        if own is None and given is None:
            raise UserError(f"MODEL: {name} has no tokenizer; name it as --tokenizer")
        if chosen is None:
            chosen, of = own, name
        if own is not None and vocabulary_digest(own) != vocabulary_digest(chosen):
            fix = "compare models with the same vocabulary, whose losses are comparable"
            raise UserError(f"MODEL: {name} and {of} have different tokenizers; {fix}")
        if len(chosen) > read.config.vocab_size:
            problem = f"the tokenizer has {len(chosen):,} tokens, but {name} {read.config.vocab_size:,}"
            raise UserError(f"{problem}; name the tokenizer it was trained with as --tokenizer")
        model = LionForMaskedLM(read.config)
        load_all(model, weights, name)
        models.append(model.eval())
    if chosen.mask_token_id is None:
        raise UserError(f"the tokenizer of {of} has no mask token; name another as --tokenizer")
    return models, chosen


def digest(model: LionForMaskedLM) -> str:
    """Return the SHA-256 of what a model computes: its weights and configuration."""
    facts = json.dumps(model.config.to_dict(), sort_keys=True, default=str).encode()
    return sha256([facts, weights_digest(model.state_dict()).encode()])


def longest_text(model: LionForMaskedLM) -> int | None:
    """Return the number of position embeddings; None if there are none."""
    return model.config.max_position_embeddings if model.config.has_positions else None


def read_rows(
    files: Sequence[Path], column: str, tokenizer: PreTrainedTokenizerBase, length: int, count: int
) -> list[list[int]]:
    """Return the first `count` rows of `length` tokens, or as many as the files hold. Raises UserError for fewer than
    two, between which nothing can vary."""
    tokenizer.model_max_length = sys.maxsize  # or it would warn of long texts, which are cut into rows
    texts = (text for path in files for batch in read_batches(path, column) for text in batch.texts)
    rows = []
    with progress(total=count, desc="reading", unit="row") as bar:
        for row in token_rows(texts, tokenizer, length):
            rows.append(row)
            bar.update()
            if len(rows) == count:
                break
    if len(rows) < 2:
        found = f"--data_files hold {'one row' if rows else 'no row'} of {length:,} tokens, and two are needed"
        raise UserError(f"{found}; give more text, or shorter --lengths")
    return rows


def mask_rows(
    rows: Sequence[Sequence[int]], tokenizer: PreTrainedTokenizerBase, mlm_probability: float, seed: int
) -> tuple[Tensor, Tensor]:
    """Return rows with masked tokens, and their labels, both (rows, L). A row's masks depend on (seed, its number)
    alone. Raises UserError if no token is masked."""
    masking = Masking(tokenizer, mlm_probability, seed, every_epoch=False)
    masked = [masking(np.array(row, np.int64), 0, number) for number, row in enumerate(rows)]
    ids, labels = (torch.from_numpy(np.stack(parts)) for parts in zip(*masked))
    if not len(labelled_positions(labels)):
        raise UserError(
            f"--mlm_probability={mlm_probability} masks none of the {ids.numel()} tokens; raise it or --rows"
        )
    return ids, labels


@torch.inference_mode()
def predict(
    model: LionForMaskedLM, ids: Tensor, labels: Tensor, length: int, reading: Reading, bar: Any
) -> tuple[Tensor, Tensor]:
    """Cut masked rows, (rows, L), into pieces of `length` tokens, a divisor of L, and read each on its own.

    Returns: (rows,) each: masked tokens predicted correctly, and the sum of their losses in nats. `bar` counts tokens.
    Raises RunFailed for losses that are not finite.
    """
    right, loss = torch.zeros(2, len(ids), dtype=torch.float64)
    pieces, wanted = (x.view(-1, length).split(max(1, reading.batch_tokens // length)) for x in (ids, labels))
    start = 0  # the number of the batch's first token among those of all rows
    for piece, targets in zip(pieces, wanted):
        masked = labelled_positions(targets)
        with torch.autocast(reading.device, torch.bfloat16, enabled=reading.bfloat16):
            x = model.lion(piece.to(reading.device)).last_hidden_state.flatten(0, 1)
            for places in masked.split(AT_ONCE):
                logits = model.head(x[places.to(reading.device)]).float()
                target, row = targets.flatten()[places].to(reading.device), (start + places) // ids.shape[1]
                right.index_add_(0, row, (logits.max(-1).indices == target).double().cpu())
                loss.index_add_(0, row, F.cross_entropy(logits, target, reduction="none").double().cpu())
        start += piece.numel()
        bar.update(piece.numel())
    if not loss.isfinite().all():
        raise RunFailed("the losses are not finite; use --precision fp32, or another checkpoint")
    return right, loss
