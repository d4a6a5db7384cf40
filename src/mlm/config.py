"""Config of masked-language-model pretraining: `main.py`."""

from dataclasses import dataclass, field
from typing import Any

from src.config import key
from src.data.config import LoaderConfig
from src.errors import UserError
from src.training.config import RunConfig


@dataclass
class PretrainConfig(RunConfig):
    """Keys of `main.py`."""

    model: dict[str, Any] = key(
        "mixer and sizes: arguments of LionConfig (src/lion/configuration_lion.py); and pretrained_checkpoint, to "
        "start from the weights of a checkpoint of main.py or the paper's authors, a Hub folder or a Hugging Face BERT",
        {},
    )
    tokenizer_name: str = key("Hub name or folder of the tokenizer")
    data_local: str = key("folder with the shards that src/convert_dataset.py wrote", may_change=True)
    data_remote: str | None = key(
        "where the shards are, if `data_local` is only a cache for them", None, may_change=True
    )
    max_seq_len: int = key("maximum sequence length in tokens", at_least=3, at_most=2**32 - 1)
    mlm_probability: float = key("masking rate in training", above=0, below=1)
    train_loader: LoaderConfig = field(default_factory=LoaderConfig)
    eval_loader: LoaderConfig = field(default_factory=LoaderConfig)

    def check(self) -> None:
        """Check keys against each other. Raises UserError."""
        super().check()
        if self.load_path is not None and self.model.get("pretrained_checkpoint") is not None:
            raise UserError("load_path and model.pretrained_checkpoint both name what to start from; omit one")
        for loader in ("train_loader", "eval_loader"):
            name = getattr(self, loader).dataset.tokenizer_name
            if name != self.tokenizer_name:
                raise UserError(
                    f"{loader}.dataset.tokenizer_name={name} differs from tokenizer_name={self.tokenizer_name};"
                    " a run has one tokenizer, so omit it"
                )
