"""The embedding model as a Composer model: vectors of a microbatch, loss of cached gradients, scores of rankings."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat
from transformers import PreTrainedTokenizerBase

from src.embed.beir import Retrieval
from src.embed.scores import cosines, means, measure, rank
from src.lion import LionEmbeddingModel
from src.training.trainer import AutocastModel

AT_ONCE = 256  # queries
INPUTS = ("input_ids", "attention_mask", "seq_idx", "pooling_mask")


class Rankings(Metric):
    """Keeps the vectors of the texts of `retrievals`: the documents and then the queries of each, numbered in turn."""

    def __init__(self, retrievals: list[Retrieval]):
        super().__init__()
        self.retrievals = retrievals
        self.add_state("vectors", default=[], dist_reduce_fx="cat")
        self.add_state("numbers", default=[], dist_reduce_fx="cat")

    def update(self, vectors: Tensor, numbers: Tensor) -> None:
        self.vectors.append(vectors)
        self.numbers.append(numbers)

    def compute(self) -> Tensor:
        values, start = [], 0
        numbers, vectors = map(dim_zero_cat, (self.numbers, self.vectors))
        ordered = vectors.new_empty(int(numbers.max()) + 1, vectors.shape[1])
        ordered[numbers] = vectors
        for retrieval in self.retrievals:
            middle = start + len(retrieval.documents)
            stop = middle + len(retrieval.queries)
            values.append(self.value(retrieval, ordered[middle:stop], ordered[start:middle]))
            start = stop
        return torch.tensor(values).mean()

    def value(self, retrieval: Retrieval, queries: Tensor, documents: Tensor) -> float:
        raise NotImplementedError


class RetrievalNDCG(Rankings):
    """nDCG@10, the mean of data sets."""

    def value(self, retrieval: Retrieval, queries: Tensor, documents: Tensor) -> float:
        return means(measure(retrieval, rank(retrieval, cosines(queries, documents), depth=10)))["nDCG@10"]


class RetrievalLoss(Rankings):
    """−log of the softmax of each relevant document among all that are not relevant, the mean of judgements."""

    def __init__(self, retrievals: list[Retrieval], temperature: float):
        super().__init__(retrievals)
        self.temperature = temperature

    def value(self, retrieval: Retrieval, queries: Tensor, documents: Tensor) -> float:
        numbers = {name: number for number, name in enumerate(retrieval.documents)}
        relevant = [[numbers[name] for name, grade in of.items() if grade > 0] for of in retrieval.judged.values()]
        total = 0.0
        for start in range(0, len(queries), AT_ONCE):
            scores = queries[start : start + AT_ONCE] @ documents.T / self.temperature
            for row, found in zip(scores, relevant[start : start + AT_ONCE]):
                others = row.clone()
                others[found] = -torch.inf
                total += float((torch.logaddexp(others.logsumexp(0), row[found]) - row[found]).sum())
        return total / sum(map(len, relevant))


class LionEmbedder(AutocastModel):
    """Texts to vectors of unit length, in float32 at least."""

    def __init__(
        self,
        model: LionEmbeddingModel,
        tokenizer: PreTrainedTokenizerBase,
        retrievals: list[Retrieval],
        temperature: float,
        embedding: Mapping[str, Any],
    ):
        measured = [RetrievalLoss(retrievals, temperature), RetrievalNDCG(retrievals)]
        super().__init__(model, tokenizer, metrics=[], eval_metrics=measured)
        self.embedding = dict(embedding)
        for layer in model.lion.layers:  # the units that Composer's FSDP shards, and recomputes if asked to
            layer._fsdp_wrap = layer._activation_checkpointing = True

    def forward(self, batch: Mapping[str, Any]) -> Tensor:
        """Return the vectors of a microbatch, (texts, D), in the order of its `texts`."""
        if "seed" in batch:
            torch.manual_seed(batch["seed"])
        with self.autocast():
            inputs = {name: batch[name] for name in INPUTS if name in batch}
            vectors = self.model(**inputs).pooler_output
        return F.normalize(vectors, dim=-1)

    def loss(self, outputs: Tensor, batch: Mapping[str, Any]) -> Tensor:
        """Return a loss with the value of the whole batch's, and the gradient of the microbatch's part of it."""
        part = batch["scale"] * (outputs * batch["gradients"]).sum()
        return batch["loss"] + part - part.detach()

    def eval_forward(self, batch: Mapping[str, Any], outputs: Any = None) -> Tensor:
        return self(batch)

    def update_metric(self, batch: Mapping[str, Any], outputs: Tensor, metric: Metric) -> dict[str, Any]:
        metric.update(outputs, batch["numbers"])
        return {}
