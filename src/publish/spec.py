"""How each model class is published: an ExportSpec holds what export, verify and the model card need."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from src.lion import LionConfig


def example_tokens(config: LionConfig) -> dict[str, Tensor]:
    """Return a padded batch of three rows for a text model without a tokenizer."""
    ids = (torch.arange(3 * 16) % config.vocab_size).view(3, 16)
    mask = torch.arange(16) < torch.tensor([[16], [9], [1]])
    return {"input_ids": ids, "attention_mask": mask.long()}


TEXTS = (  # a text, or a pair
    ("The encoder reads the whole sentence at once.",),
    ("A short one.",),
    ("Every weight in this folder was loaded from a checkpoint, and these words show that none is missing.",),
    ("Is this a question?", "This is its answer: 3.14 × 2 = 6.28 (more or less)."),
    ("The naïve café of Zürich, 東京 and Αθήνα; e-mail: someone@example.org",),
)


@dataclass(frozen=True)
class ExportSpec:
    auto_class: str  # the transformers class that loads it
    pipeline_tag: str | None = None
    usage: str | None = None  # a call of its pipeline, for the card; EXAMPLE becomes a text or a pair
    # Metrics that the card reports: key in metrics.jsonl → label, format, and type in the metadata (None: not there).
    metrics: dict[str, tuple[str, str, str | None]] = field(default_factory=dict)
    processor: str = "AutoTokenizer"  # the transformers class that prepares its inputs
    reads: str = "texts"  # or "images"
    module: str = "modeling_lion"
    library: str = "transformers"  # that people use it with
    examples: tuple = TEXTS  # processor inputs, to compare a folder with its checkpoint
    example_inputs: Callable[[LionConfig], dict[str, Tensor]] = example_tokens  # model inputs, if there is no processor


IMAGES = {"processor": "AutoImageProcessor", "reads": "images", "module": "modeling_lion_vision", "examples": ()}
EXPORTS = {
    "LionModel": ExportSpec("AutoModel"),
    "LionForMaskedLM": ExportSpec(
        "AutoModelForMaskedLM",
        "fill-mask",
        'fill(f"She read the {fill.tokenizer.mask_token} from the first page to the last.")',
        metrics={
            "eval/MaskedAccuracy": ("masked accuracy", "{:.2%}", "accuracy"),
            "eval/MostFrequentTokenAccuracy": ("accuracy of always predicting the most frequent token", "{:.2%}", None),
            "eval/LanguageCrossEntropy": ("loss", "{:.3f}", "cross entropy"),
        },
    ),
    "LionForSequenceClassification": ExportSpec(
        "AutoModelForSequenceClassification", "text-classification", "classify(EXAMPLE)"
    ),
    "LionForTokenClassification": ExportSpec("AutoModelForTokenClassification", "token-classification"),
    "LionForQuestionAnswering": ExportSpec("AutoModelForQuestionAnswering", "question-answering"),
    "LionEmbeddingModel": ExportSpec(
        "AutoModel",
        "sentence-similarity",
        metrics={
            "eval/RetrievalNDCG": ("nDCG@10", "{:.2%}", None),
            "eval/RetrievalLoss": ("loss", "{:.3f}", None),
        },
        module="modeling_lion_embedding",
        library="sentence-transformers",
    ),
    "LionImageModel": ExportSpec("AutoModel", **IMAGES),
    "LionForImageClassification": ExportSpec(
        "AutoModelForImageClassification",
        "image-classification",
        'classify("picture.jpg")',
        metrics={
            "eval/Top1": ("top-1 accuracy", "{:.2%}", "accuracy"),
            "eval/Top5": ("top-5 accuracy", "{:.2%}", None),
            "eval/MajorityAccuracy": ("accuracy of always predicting the most frequent class", "{:.2%}", None),
            "eval/CrossEntropy": ("loss", "{:.3f}", "cross entropy"),
        },
        **IMAGES,
    ),
}
