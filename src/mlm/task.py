"""Masked-language-model pretraining: the config of `main.py`, and the task that `src/training/run.py` runs."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from src.cli import log, several
from src.config import check_known, key
from src.data.config import LoaderConfig, check_split
from src.data.tokenizers import check_path, frames_texts, vocabulary_digest
from src.errors import UserError
from src.mlm.finetune_eval import FinetuneEval
from src.training.config import RunConfig, check_state_passing, state_passing
from src.training.ranks import decide
from src.training.task import Curve, Task

if TYPE_CHECKING:
    from composer import DataSpec
    from torch import Tensor

    from src.checkpoints.reading import Checkpoint
    from src.mlm.model import LionMLM
    from src.publish.callback import Background
    from src.training.checkpointing import CheckpointWriter
    from src.training.run_log import RunLog

CURVES = (
    Curve("loss", "loss", "eval/LanguageCrossEntropy", "loss/train/total", unit="nats per masked token"),
    Curve("accuracy", "masked accuracy", "eval/MaskedAccuracy", "metrics/train/MaskedAccuracy", percent=True),
    Curve("most_frequent_token", "most frequent token", "eval/MostFrequentTokenAccuracy", percent=True, baseline=True),
)


@dataclass
class PretrainConfig(RunConfig):
    """Keys of `main.py`."""

    model: dict[str, Any] = key(
        "mixer and sizes: arguments of LionConfig (src/lion/configuration_lion.py); and pretrained_checkpoint, to "
        "start from the weights of a checkpoint (main.py's, the paper authors', Hydra's), a Hub folder, or a Hugging "
        "Face BERT or ModernBERT",
        {},
    )
    tokenizer_name: str = key("Hub name or folder of the tokenizer")
    data_local: str = key("folder with the shards that src/convert_dataset.py wrote", may_change=True)
    data_remote: str | None = key("where the shards are, if data_local is only a cache", None, may_change=True)
    max_seq_len: int = key("maximum sequence length in tokens", at_least=3, at_most=2**32 - 1)
    mlm_probability: float = key("masking rate in training", above=0, below=1)
    state_passing: float = state_passing()
    train_loader: LoaderConfig = field(default_factory=LoaderConfig)
    eval_loader: LoaderConfig = field(default_factory=LoaderConfig)
    finetune_eval: FinetuneEval = field(default_factory=FinetuneEval)

    def check(self) -> None:
        super().check()
        for loader in ("train_loader", "eval_loader"):
            if (name := getattr(self, loader).dataset.tokenizer_name) != self.tokenizer_name:
                differs = f"differs from tokenizer_name={self.tokenizer_name}"
                raise UserError(f"{loader}.dataset.tokenizer_name={name} {differs}; a run has one, so omit it")
            getattr(self, loader).check(loader)
        self._check_lengths()
        self.finetune_eval.check()
        packing, microbatch = self.train_loader.dataset.packing, self.device_train_microbatch_size
        check_state_passing(self.state_passing, packing, "train_loader.dataset.packing", microbatch)

    def _check_lengths(self) -> None:
        """Raise UserError for a setting that needs the number of batches of a dataset on the Hub."""
        lengths = {f"scheduler.{name}": value for name, value in self.scheduler.items()}
        lengths |= {"max_duration": self.max_duration}
        for name, value in lengths.items() if self.train_loader.dataset.hub is not None else ():
            if isinstance(value, str) and value.lower().endswith("ep"):
                problem = f"{name}={value}: the length of an epoch of train_loader.dataset.hub is unknown"
                raise UserError(f"{problem}; give it in ba, sp or tok")
        if self.eval_loader.dataset.hub is not None and self.eval_subset_num_batches == -1:
            problem = "eval_subset_num_batches=-1: the number of batches of eval_loader.dataset.hub is unknown"
            raise UserError(f"{problem}; set how many to evaluate on")


class MaskedLM(Task):
    """Pretrain an encoder on shards of text or tokens."""

    command = "main.py"
    curves = CURVES

    def __init__(self, config: PretrainConfig):
        super().__init__(config)
        self.max_tokens_per_sample = config.max_seq_len
        self.sample = f"up to {config.max_seq_len} tokens each"
        self.datasets = (config.train_loader.dataset, config.eval_loader.dataset)
        self.max_seq_len = max(dataset.max_seq_len for dataset in self.datasets)

    @property
    def compiles_well(self) -> bool:
        """Packed rows have not been compiled on a GPU; softmax would read them with a mask of all pairs of tokens."""
        return not self.config.train_loader.dataset.packing

    def check_paths(self) -> None:
        super().check_paths()
        config = self.config
        check_path(config.tokenizer_name, "tokenizer_name")
        for dataset in self.datasets:
            if dataset.hub is None and dataset.remote is None and not dataset.streams:
                check_split("data_local", Path(dataset.local), dataset.split)
        if config.finetune_eval.tasks:
            config.finetune_eval.check_tasks(Path(config.save_folder), config.tokenizer_name)

    def background(self, writer: "CheckpointWriter", run_log: "RunLog") -> "list[Background]":
        from src.mlm.evaluations import FinetuneEvaluations, release

        if not (settings := self.config.finetune_eval).tasks:
            release(writer.folder)  # what an earlier part of the run has left
            return []
        return [FinetuneEvaluations(writer, settings, self.config.run_name, run_log)]

    def build_model(self, checkpoint: Path | None) -> "LionMLM":
        """Return a model with random weights, or with the encoder, and any head, of `model.pretrained_checkpoint`."""
        from src.training.text_model import build_tokenizer, set_state_passing

        config = self.config
        self.tokenizer = build_tokenizer(config.tokenizer_name, config.max_seq_len, ("mask_token", "pad_token"))
        model = self._starting_model(checkpoint)
        if model.model.config.classifier_pooling == "cls" and not frames_texts(self.tokenizer):
            found = f"tokenizer_name: {config.tokenizer_name} does not read a text as [CLS] … [SEP], and a classifier"
            log.warning(f"{found} reads the first token; to train one later, set model.classifier_pooling=mean")
        set_state_passing(model.model.lion, config.state_passing)
        return model

    def _starting_model(self, checkpoint: Path | None) -> "LionMLM":
        from src.checkpoints.adapters import ARGUMENTS
        from src.checkpoints.reading import load_all
        from src.mlm.model import LionMLM
        from src.training.loading import read_start
        from src.training.text_model import build_lion_config, lion_arguments, widen_horizons

        config = self.config
        section = dict(config.model)
        check_known("model", section, (*ARGUMENTS, "pretrained_checkpoint"))
        if (name := section.pop("pretrained_checkpoint", None)) is None:
            return LionMLM(build_lion_config(section, self.tokenizer, self.max_seq_len), self.tokenizer)
        start = read_start(name, "model.pretrained_checkpoint", checkpoint)
        if (own := start.load_tokenizer()) and vocabulary_digest(own) != vocabulary_digest(self.tokenizer):
            raise UserError(f"tokenizer_name={config.tokenizer_name} is not the tokenizer of {name}; use that one")
        section = {**lion_arguments(start.config.to_dict()), **section}
        model = LionMLM(build_lion_config(section, self.tokenizer, self.max_seq_len), self.tokenizer)
        if checkpoint is not None:  # whose weights follow
            return model
        weights, has_head = masked_lm_weights(start)
        if not has_head:
            random = model.model.state_dict().items()
            weights = {part: tensor for part, tensor in random if part.startswith("head.")} | weights
        load_all(model.model, weights, name, start.config)
        log.info(f"weights of {name}{'' if has_head else ', with a new head'}")
        widen_horizons(model.model.lion, start.config)
        return model

    def build_loaders(self, device_batch_size: int) -> "tuple[DataSpec, DataSpec]":
        from composer import DataSpec

        from src.data import batches, hub_samples, streaming

        config = self.config
        if config.state_passing and device_batch_size == 1:
            found = f"state_passing={config.state_passing} has no effect with one text per device"
            raise UserError(f"{found}; raise global_train_batch_size, or omit state_passing")
        of_train, of_eval = (streaming if dataset.hub is None else hub_samples for dataset in self.datasets)
        train = of_train.build(at_one_commit(config.train_loader), self.tokenizer, device_batch_size, train=True)
        evaluation = of_eval.build(
            at_one_commit(config.eval_loader), self.tokenizer, config.device_eval_batch_size, train=False
        )
        self.statistics = train.padding
        self.data = of_train.describe(config.train_loader.dataset, train.dataset)
        methods = {"get_num_tokens_in_batch": batches.token_counts, "split_batch": batches.split_batch}
        methods["get_num_samples_in_batch"] = batches.sample_count  # a packed row holds several
        return DataSpec(train, **methods), DataSpec(evaluation, **methods)

    def describe(self, model: "LionMLM") -> tuple[str, str]:
        sizes = model.config
        return f"{sizes.mixer}, {sizes.num_hidden_layers} layers of {sizes.hidden_size}", self.data


def at_one_commit(loader: LoaderConfig) -> LoaderConfig:
    """Return a loader's config; if several ranks read a dataset of the Hub, at the commit that rank 0 finds."""
    from src.data.hub_samples import open_source

    dataset = loader.dataset
    if dataset.hub is None or not several():
        return loader
    commit = decide(lambda: open_source(dataset).description["revision"])
    return replace(loader, dataset=replace(dataset, revision=commit))


def masked_lm_weights(read: "Checkpoint") -> "tuple[dict[str, Tensor], bool]":
    """Return a checkpoint's weights without those that a LionForMaskedLM does not use, and whether it has a head."""
    unused = ("lion.pooler.", "classifier.")  # of classifiers
    weights = {part: tensor for part, tensor in read.weights.items() if not part.startswith(unused)}
    has_head = any(part.startswith("head.") for part in weights)
    if (embeddings := weights.get("lion.embeddings.word_embeddings.weight")) is not None:
        weights.setdefault("head.decoder.weight", embeddings)  # tied: a Hub folder stores one of the two
    return weights, has_head
