"""What a Hub folder holds besides weights and code, and how it is compared with its checkpoint: for models of texts and
of images."""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import DataCollatorWithPadding

from src.checkpoints.reading import PREPROCESSOR, SENTENCE_LIMIT, SENTENCE_PROMPTS, STORED_POSITIONS, Checkpoint
from src.cli import log
from src.errors import UserError
from src.lion import LionConfig, LionEmbeddingModel, LionPreTrainedModel, LionVisionConfig
from src.publish.spec import EXPORTS

NO_LIMIT = 2**31 - 1  # as max_position_embeddings: sentence-transformers needs a number that fits a 64-bit integer
EMBEDDING = LionEmbeddingModel.__name__
VECTOR_TOLERANCE = 1e-5  # of a coordinate of a unit vector
LONG = ("the " * 9000).strip()  # sentence-transformers strips a text, whose last space can be a token
PIXEL_TOLERANCE = 1e-6  # of what a folder's processor makes of an image


class TextInputs:
    """A tokenizer, if the checkpoint has one."""

    def __init__(self, checkpoint: Checkpoint):
        self.checkpoint = checkpoint
        self.tokenizer = self.tokens = None

    def files(self, config: LionConfig) -> dict[str, bytes]:
        """Return the folder's other files, and change the config that is stored with them."""
        files = self.checkpoint.tokenizer_files()
        if files:
            tokenizer_config = json.loads(files.get("tokenizer_config.json", b"{}"))
            limit = config.max_position_embeddings if config.has_positions else int(1e30)  # transformers' "no limit"
            limited = {**tokenizer_config, "model_max_length": limit}
            files["tokenizer_config.json"] = json.dumps(limited, indent=2).encode()
            # pipeline() finds no tokenizer for an architecture it does not know, unless the config names one.
            config.tokenizer_class = tokenizer_config.get("tokenizer_class")
        files |= sentence_transformers_files(self.checkpoint)
        if not config.has_positions:
            setattr(config, STORED_POSITIONS, config.max_position_embeddings)
            config.max_position_embeddings = NO_LIMIT
        return files

    def given(self) -> dict[str, Any]:
        """Return what the folder is given to compute in its own process; "inputs" are the model's."""
        own, spec = self.checkpoint.config, EXPORTS[self.checkpoint.class_name]
        inputs, max_length = spec.example_inputs(own), min(own.max_position_embeddings, 128)
        self.tokenizer = tokenizer = self.checkpoint.load_tokenizer()
        if tokenizer is not None:
            batch = [dict(tokenizer(*text, truncation=True, max_length=max_length)) for text in spec.examples]
            inputs = dict(DataCollatorWithPadding(tokenizer)(batch))
            self.tokens = {"tokens": batch, "vocabulary": tokenizer.get_vocab()}
        given = {"inputs": inputs, "texts": spec.examples, "max_length": max_length, "long": LONG}
        if self.checkpoint.class_name == EMBEDDING and tokenizer is not None:
            given["embed"] = [text for text, *_ in spec.examples]
            given["longest"] = own.max_position_embeddings if own.has_positions else NO_LIMIT
        return given

    def check(self, folder: Path, report: dict[str, Any], model: LionPreTrainedModel) -> None:
        """Raise UserError unless the folder's process tokenized as the checkpoint does, and its vectors are equal."""
        if report["tokens"] is not None:
            self._check_limits(folder, report)
        if self.tokens is None and report["tokens"] is not None:
            path = self.checkpoint.path
            log.info(f"the tokens of {folder} are not compared: {path} has no tokenizer; pass --tokenizer")
        elif self.tokens != report["tokens"]:
            raise UserError(f"{folder} and its checkpoint tokenize differently; export it again")
        if "vectors" in report:
            self._check_embeddings(folder, report, model)

    def differing(self, folder: Path) -> list[str]:
        """Return which of the files for sentence-transformers differ; a longer limit than in training may stand."""
        own, trained = self.checkpoint.config, max_seq_length(self.checkpoint)
        expected = {name: json.loads(content) for name, content in sentence_transformers_files(self.checkpoint).items()}
        found = {name: _read_json(folder / name) for name in expected}
        if not expected:
            return []
        limit = (found.pop(SENTENCE_LIMIT) or {}).get("max_seq_length")
        names = sorted(name for name in found if found[name] != expected[name])
        longest = own.max_position_embeddings if own.has_positions else NO_LIMIT
        if not (isinstance(limit, int) and trained <= limit <= longest):
            names.append(f"max_seq_length ({limit}, and {trained} in training)")
        return names

    def _check_embeddings(self, folder: Path, report: dict[str, Any], model: LionPreTrainedModel) -> None:
        """Raise UserError unless sentence-transformers, or what stands in for it, gives the checkpoint's vectors."""
        own, limit = self.checkpoint.config, _read_json(folder / SENTENCE_LIMIT)["max_seq_length"]
        texts = [text for text, *_ in EXPORTS[EMBEDDING].examples] + [LONG]
        limits = [limit] * (len(texts) - 1) + [own.max_position_embeddings if own.has_positions else NO_LIMIT]
        for text, most, vector in zip(texts, limits, report["vectors"]):
            ids = self.tokenizer(text, truncation=True, max_length=most, return_tensors="pt")["input_ids"]
            with torch.no_grad():
                own_vector = F.normalize(model(ids).pooler_output[0], dim=-1)
            if not (difference := (own_vector - vector).abs().max().item()) <= VECTOR_TOLERANCE:
                problem = f"the vectors of {folder} in {report['encoder']} differ from the checkpoint's"
                raise UserError(f"{problem} by {difference:.1e}, at {ids.shape[1]:,} tokens; export it again")

    def _check_limits(self, folder: Path, report: dict[str, Any]) -> None:
        """Raise UserError unless texts are truncated to the position table, if any, or as earlier versions did."""
        config = self.checkpoint.config
        own = config.max_position_embeddings
        trained = own if self.tokenizer is None else self.tokenizer.model_max_length
        table = own if config.has_positions else NO_LIMIT
        full, read, positions = report["long"], report["long_truncated"], report["max_position_embeddings"]
        if (read, positions) == (min(full, table), table):
            return
        right = f"{table:,} tokens" if config.has_positions else "texts of any length"
        what = f"{folder} limits texts to {min(read, positions):,} tokens, but {config.mixer} reads {right}"
        if read not in (min(full, trained), min(full, table)) or positions not in (own, table):
            raise UserError(f"{what}; export it again")
        log.info(f"{what}; it is from an earlier version, export it again to change that")


class ImageInputs:
    """An image processor."""

    def __init__(self, checkpoint: Checkpoint):
        self.checkpoint = checkpoint
        self.pixels = None

    def files(self, config: LionVisionConfig) -> dict[str, bytes]:
        """Return the folder's other files."""
        return {PREPROCESSOR: f"{json.dumps(self.checkpoint.processor, indent=2)}\n".encode()}

    def differing(self, folder: Path) -> list[str]:
        """Return which other files differ: the processor's is compared as it is read."""
        return []

    def given(self) -> dict[str, Any]:
        """Return what the folder is given to compute in its own process; "inputs" are the model's."""
        from PIL import Image
        from transformers import CLIPImageProcessor

        images = example_images()
        pictures = [Image.fromarray(image.numpy()) for image in images]
        pixels = CLIPImageProcessor(**self.checkpoint.processor)(pictures, return_tensors="pt")["pixel_values"]
        channels = self.checkpoint.config.num_channels
        if channels == 3:
            self.pixels = pixels
        else:  # which no processor makes
            pixels = pixels.repeat(1, -(-channels // 3), 1, 1)[:, :channels].contiguous()
        return {"inputs": {"pixel_values": pixels}, "images": images}

    def check(self, folder: Path, report: dict[str, Any], model: LionPreTrainedModel) -> None:
        """Raise UserError unless the folder's processor makes the same of images."""
        if self.pixels is None:
            return
        difference = (report["pixels"] - self.pixels).abs().max().item()
        if not difference <= PIXEL_TOLERANCE:
            problem = f"the image processor of {folder} differs from the checkpoint's by {difference:.1e}"
            raise UserError(f"{problem}; export it again")


def max_seq_length(checkpoint: Checkpoint) -> int:
    """The longest text that a folder's users get read: by default, as long as those of its training."""
    return checkpoint.embedding.get("max_seq_len") or checkpoint.config.max_position_embeddings


def sentence_transformers_files(checkpoint: Checkpoint) -> dict[str, bytes]:
    """What sentence-transformers reads beside the model, under the names that its versions 5 and 6 know; none for a
    model that gives no vectors. The mean of the hidden states is the vector for attention pooling too."""
    if checkpoint.class_name != EMBEDDING:
        return {}
    first = checkpoint.config.pooling == "cls"
    types = {"": "Transformer", "1_Pooling": "Pooling", "2_Normalize": "Normalize"}
    contents = {
        "modules.json": [
            {"idx": number, "name": str(number), "path": path, "type": f"sentence_transformers.models.{kind}"}
            for number, (path, kind) in enumerate(types.items())
        ],
        "1_Pooling/config.json": {
            "word_embedding_dimension": checkpoint.config.hidden_size,
            "pooling_mode_cls_token": first,
            "pooling_mode_mean_tokens": not first,
        },
        SENTENCE_LIMIT: {"max_seq_length": max_seq_length(checkpoint), "do_lower_case": False},
        SENTENCE_PROMPTS: {
            "prompts": {"query": "", "document": "", **checkpoint.embedding.get("prompts", {})},
            "default_prompt_name": None,
            "similarity_fn_name": "cosine",
        },
    }
    return {name: f"{json.dumps(content, indent=2)}\n".encode() for name, content in contents.items()}


def _read_json(path: Path) -> Any:
    """The contents of a JSON file; None if it cannot be read."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None


def example_images() -> list[Tensor]:
    """Five pictures of different shapes, (height, width, 3) or grey (height, width), in bytes."""
    generator = torch.Generator().manual_seed(0)
    shapes = (224, 224, 3), (333, 500, 3), (500, 251, 3), (97, 64, 3), (120, 161)
    smooth = [torch.rand(1, 3, 5, 5, generator=generator) for _ in shapes]
    images = [F.interpolate(x, shape[:2], mode="bicubic")[0].clamp(0, 1) for x, shape in zip(smooth, shapes)]
    images = [(255 * x).round().byte().permute(1, 2, 0).contiguous() for x in images]
    return [image if len(shape) == 3 else image[..., 0].contiguous() for image, shape in zip(images, shapes)]
