"""Masked-language-model pretraining as a task for `src/training/run.py`."""

from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from src.cli import log
from src.data.splits import check_split
from src.data.tokenizers import check_path, vocabulary_digest
from src.errors import UserError
from src.mlm.config import PretrainConfig
from src.training.metrics import Curve
from src.training.task import Task

if TYPE_CHECKING:
    from composer import DataSpec
    from transformers import PreTrainedTokenizerBase

    from src.mlm.model import LionMLM

CURVES = (
    Curve("loss", "loss", "eval/LanguageCrossEntropy", "loss/train/total", unit="nats per masked token"),
    Curve("accuracy", "masked accuracy", "eval/MaskedAccuracy", "metrics/train/MaskedAccuracy", percent=True),
    Curve("most_frequent_token", "most frequent token", "eval/MostFrequentTokenAccuracy", percent=True, baseline=True),
)


class MaskedLM(Task):
    """Pretrain an encoder on shards of text or tokens."""

    command = "main.py"
    curves = CURVES

    def __init__(self, config: PretrainConfig):
        super().__init__(config)
        loaders = (config.train_loader.dataset, config.eval_loader.dataset)
        self.max_seq_len = max(options.max_seq_len for options in loaders)

    @property
    def max_tokens_per_sample(self) -> int:
        return self.config.max_seq_len

    def check_paths(self) -> None:
        config = self.config
        check_path(config.tokenizer_name, "tokenizer_name")
        for options in (config.train_loader.dataset, config.eval_loader.dataset):
            if options.remote is None and not options.streams:
                check_split("data_local", Path(options.local), options.split)
        start = config.load_path if not any(Path(config.save_folder).glob("ep*-rank0.pt")) else None  # unused on resume
        if start is not None and "://" not in start and not Path(start).is_file():
            raise UserError(f"load_path={config.load_path} is not a file; give a checkpoint or omit load_path")

    @cached_property
    def tokenizer(self) -> "PreTrainedTokenizerBase":
        from src.training.text_model import build_tokenizer

        return build_tokenizer(self.config.tokenizer_name, self.config.max_seq_len, needs=("mask_token", "pad_token"))

    def build_model(self, checkpoint: Path | None) -> "LionMLM":
        """Return a model with random weights, or with the encoder, and any head, of `model.pretrained_checkpoint`.

        A resumed run takes its sizes from `checkpoint`, its own, since the one it started from may be gone.
        """
        from src.mlm.model import LionMLM
        from src.training.text_model import build_lion_config, lion_arguments

        section = dict(self.config.model)
        name = section.pop("pretrained_checkpoint", None)
        if name is None:
            return LionMLM(build_lion_config(section, self.tokenizer, self.max_seq_len), self.tokenizer)

        from src.checkpoints.pretrained import read_pretrained
        from src.checkpoints.reading import load_all

        name = str(checkpoint or name)
        start = read_pretrained(name, "model.pretrained_checkpoint")
        if start.tokenizer is not None and vocabulary_digest(start.tokenizer) != vocabulary_digest(self.tokenizer):
            raise UserError(f"tokenizer_name={self.config.tokenizer_name} is not the tokenizer of {name}; use that one")
        section = {**lion_arguments(start.config), **section}
        model = LionMLM(build_lion_config(section, self.tokenizer, self.max_seq_len), self.tokenizer)
        has_head = any(part.startswith("head.") for part in start.weights)
        unused = ("lion.pooler.", "classifier.")  # of classifiers
        weights = {part: tensor for part, tensor in start.weights.items() if not part.startswith(unused)}
        if (embeddings := weights.get("lion.embeddings.word_embeddings.weight")) is not None:
            weights.setdefault("head.decoder.weight", embeddings)  # tied: a Hub folder stores one of the two
        if not has_head:
            new_head = {part: tensor for part, tensor in model.model.state_dict().items() if part.startswith("head.")}
            weights = {**new_head, **weights}
        load_all(model.model, weights, name)
        log.info(f"weights of {name}{'' if has_head else ', with a new head'}")
        return model

    def build_loaders(self, device_batch_size: int) -> "tuple[DataSpec, DataSpec]":
        from composer import DataSpec

        from src.data import batches, streaming

        config = self.config
        train = streaming.build(config.train_loader, self.tokenizer, device_batch_size, train=True)
        evaluation = streaming.build(config.eval_loader, self.tokenizer, config.device_eval_batch_size, train=False)
        self.statistics = train.padding
        self.data = streaming.describe(config.train_loader.dataset, train.dataset)
        methods = {
            "split_batch": batches.split_batch,
            "get_num_samples_in_batch": batches.sample_count,  # a packed row holds several
            "get_num_tokens_in_batch": batches.token_counts,
        }
        return DataSpec(train, **methods), DataSpec(evaluation, **methods)

    def describe(self, model: "LionMLM") -> tuple[str, str]:
        sizes = model.config
        return f"{sizes.mixer}, {sizes.num_hidden_layers} layers of {sizes.hidden_size}", self.data
