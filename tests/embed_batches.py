"""A contrastive batch whose gradients are computed in microbatches through the cache, and all at once. As a script:
two processes share a batch and compare their gradients with those of one.

python tests/embed_batches.py FILE, a new file through which the processes find each other.
"""

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
from composer.core import Precision, Timestamp
from composer.devices import DeviceCPU
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from src.embed.cache import GradientCache, seed_of
from src.embed.loss import contrastive_loss, false_negatives
from src.embed.microbatches import assemble, split
from src.lion import LionConfig, LionEmbeddingModel

PAIRS, NEGATIVES, SEED = 6, 4, 3


class Embedder(torch.nn.Module):
    """What LionEmbedder computes, in float64."""

    def __init__(self, dropout: float, pooling: str = "attention"):
        super().__init__()
        torch.manual_seed(0)
        sizes = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
        rates = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
        self.model = LionEmbeddingModel(LionConfig(**sizes, **rates, intermediate_size=32, pooling=pooling)).double()
        if pooling == "attention":
            torch.nn.init.normal_(self.model.pooling_weight)

    def forward(self, batch):
        torch.manual_seed(batch["seed"])
        inputs = {name: batch[name] for name in ("input_ids", "attention_mask", "seq_idx") if name in batch}
        return F.normalize(self.model(**inputs).pooler_output, dim=-1)


def texts() -> list[list[int]]:
    """Queries, their documents, and negatives; the last document equals the first."""
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(1, 12, (2 * PAIRS + NEGATIVES,), generator=generator).tolist()
    found = [torch.randint(5, 50, (length,), generator=generator).tolist() for length in lengths]
    found[2 * PAIRS - 1] = found[PAIRS]
    return found


def batch_of(ids, pairs: int, texts: int | None, tokens: int | None, packing: bool) -> dict:
    """What the collator gives, with keys and positives that are made up: query 1 knows document 2 too."""
    parts = [assemble(ids, group, 0, packing) for group in split(list(map(len, ids)), texts, tokens, packing)]
    keys = torch.tensor([[hash(tuple(text))] * 2 for text in ids[pairs:]])
    positives = torch.tensor([*enumerate(keys[:pairs, 0].tolist()), (1, int(keys[2, 0])), (1, -9)])
    return {"parts": parts, "keys": keys, "positives": positives, "counts": {"queries": pairs}}


def cached(model: Embedder, batch: dict, options: dict) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return ℓ and its gradients, as Composer computes them on this device."""
    state = SimpleNamespace(
        batch=batch, model=model, device=DeviceCPU(), timestamp=Timestamp(batch=7), precision=Precision.FP32
    )
    GradientCache(SEED, **options).batch_start(state, None)
    model.zero_grad()
    total = torch.tensor(0.0)
    for part in state.batch["parts"]:
        product = part["scale"] * (model(part) * part["gradients"]).sum()
        loss = part["loss"] + product - product.detach()
        (loss / len(state.batch["parts"])).backward()
        total = total + loss.detach() / len(state.batch["parts"])
    return total, [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def at_once(model: Embedder, batch: dict, options: dict) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return the same by one loss; dropout is drawn by microbatch, as the cache has seeded it in `batch`."""
    model.zero_grad()
    numbers = torch.cat([part["texts"] for part in batch["parts"]])
    vectors = torch.cat([model(part) for part in batch["parts"]])[numbers.argsort()]
    pairs = batch["counts"]["queries"]
    excluded = false_negatives(batch["keys"], batch["positives"], pairs)
    loss = contrastive_loss(vectors[:pairs], vectors[pairs:], excluded, **options)
    loss.backward()
    return loss.detach(), [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def close(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    """Whether gradients agree to 1e-9 of the largest."""
    largest = max(x.abs().max() for x in expected)
    return len(found) == len(expected) and all((a - b).abs().max() <= 1e-9 * largest for a, b in zip(found, expected))


def share(rank: int) -> list[list[int]]:
    """A device's texts: half of the pairs, and one or three of the negatives."""
    ids, half = texts(), PAIRS // 2
    pairs = slice(rank * half, (rank + 1) * half)
    negatives = ids[2 * PAIRS :][:1] if rank == 0 else ids[2 * PAIRS :][1:]
    return ids[:PAIRS][pairs] + ids[PAIRS : 2 * PAIRS][pairs] + negatives


if __name__ == "__main__":
    other = os.fork()  # after the imports, which take seconds
    rank = int(other == 0)
    torch.distributed.init_process_group("gloo", f"file://{sys.argv[1]}", rank=rank, world_size=2)
    options = {"temperature": 0.1, "symmetric": True, "dims": (4, 16)}
    half = PAIRS // 2
    for dropout in (0.0, 0.3):
        model = Embedder(dropout)
        for packing in (False, True):
            both = [batch_of(share(of), half, 3 if of else 2, None, packing) for of in range(2)]  # 3 and 5 microbatches
            assert len({len(batch["parts"]) for batch in both}) == 2
            vectors = []
            for of, batch in enumerate(both):
                for number, part in enumerate(batch["parts"]):
                    part["seed"] = seed_of(SEED, 7, of, number)
                order = torch.cat([part["texts"] for part in batch["parts"]]).argsort()
                vectors.append(torch.cat([model(part) for part in batch["parts"]])[order])
            pieces = [slice(0, half), slice(half, 2 * half), slice(2 * half, None)]  # queries, documents, negatives
            queries, *documents = (torch.cat([each[piece] for each in vectors]) for piece in pieces)
            keys = torch.cat([batch["keys"][piece] for piece in (slice(0, half), slice(half, None)) for batch in both])
            positives = torch.cat([both[0]["positives"], both[1]["positives"] + torch.tensor([half, 0])])
            excluded = false_negatives(keys, positives, PAIRS)
            model.zero_grad()
            loss = contrastive_loss(queries, torch.cat(documents), excluded, **options)
            loss.backward()
            expected = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
            mine = both[rank]
            for part in mine["parts"]:
                del part["seed"]
            found, gradients = cached(model, mine, options)
            for gradient in gradients:  # as DDP does
                torch.distributed.all_reduce(gradient)
                gradient /= 2
            assert torch.allclose(found, loss, rtol=1e-12, atol=0), (found, loss)
            assert close(gradients, expected), (dropout, packing)
    if other == 0:
        os._exit(0)
    sys.exit(os.waitpid(other, 0)[1])
