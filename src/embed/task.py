"""Contrastive training of text embeddings: the task that `src/training/run.py` runs for `embed.py`."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from src.cli import log
from src.data.tokenizers import vocabulary_digest
from src.embed.config import EmbedConfig
from src.errors import UserError
from src.training.task import Curve, Task

if TYPE_CHECKING:
    from composer import Callback, DataSpec

    from src.embed.model import LionEmbedder

CURVES = (
    Curve("loss", "loss", "eval/RetrievalLoss", "loss/train/total", unit="nats per relevant document"),
    Curve("ndcg", "nDCG@10", "eval/RetrievalNDCG", percent=True),
)
SHOWN = 64  # pairs whose lengths are looked at before training


def prompts_of(facts: dict[str, Any]) -> dict[str, str]:
    """Return the prompts among a model's facts that are not empty, as keys of a config."""
    return {f"prompts.{kind}": text for kind, text in facts.get("prompts", {}).items() if text}


class Embedding(Task):
    """Train an encoder so that a query's vector is near those of its documents."""

    command = "embed.py"
    curves = CURVES
    microbatch_size = 1  # of Composer, unused: batches come with their microbatches

    def __init__(self, config: EmbedConfig):
        super().__init__(config)
        self.limits = (config.query_max_seq_len, config.max_seq_len)
        self.max_tokens_per_sample = sum(self.limits) + config.negatives * config.max_seq_len
        self.sample = f"queries of up to {self.limits[0]:,} tokens, documents of up to {self.limits[1]:,}"

    def check_paths(self) -> None:
        super().check_paths()
        self.config.check_data_paths()

    def build_model(self, checkpoint: Path | None) -> "LionEmbedder":
        """Return a model with random weights, or with those of `starting_checkpoint_load_path`."""
        from src.embed.batches import PairDataset
        from src.embed.beir import read_beir
        from src.embed.encoder import embedding_model
        from src.embed.model import LionEmbedder
        from src.embed.pairs import open_pairs
        from src.lion import LionConfig, LionEmbeddingModel
        from src.training.loading import position_in_data, read_start
        from src.training.text_model import (
            build_lion_config,
            build_tokenizer,
            lion_arguments,
            set_state_passing,
            widen_horizons,
        )

        config, read, own = self.config, None, None
        folder = Path(config.save_folder) / "pairs"
        sources = [open_pairs(name, source, config.prompts, folder) for name, source in config.data.items()]
        begun = None if checkpoint is None else position_in_data(checkpoint)
        # Runs of earlier versions, which stored no digest of their pairs, trained on other pairs of held-out queries.
        apart = begun is None or "pairs" in begun
        self.dataset = PairDataset(sources, config.seed, 0 if config.eval_data else config.held_out, apart)
        self.dataset.check_same(begun or {})
        if repeated := self.dataset.repeated:
            tell = log.warning if repeated > len(self.dataset) // 10 else log.info
            tell(f"{repeated:,} pairs have the query of a held-out pair, and are not trained on either (held_out)")
        if config.eval_data:
            data = [read_beir(Path(name), config.eval_split, "eval_data") for name in config.eval_data]
            self.prompts = [config.prompts] * len(data)
        else:
            data = self.dataset.retrieval()
            self.prompts = [pairs.prompts for pairs in sources]
        self.retrievals = data
        longest = max(self.limits)
        if (start := config.starting_checkpoint_load_path) is not None:
            read = read_start(start, "starting_checkpoint_load_path", checkpoint)
            own = read.load_tokenizer()
        given = build_tokenizer(config.tokenizer_name, longest) if config.tokenizer_name else None
        if given and own and vocabulary_digest(given) != vocabulary_digest(own):
            raise UserError(f"tokenizer_name={config.tokenizer_name} is not the tokenizer of {start}; omit it")
        self.tokenizer = given or own
        if self.tokenizer is None:
            raise UserError(f"{start} has no tokenizer; set tokenizer_name")
        self.tokenizer.model_max_length = longest
        arguments = {} if read is None else lion_arguments(read.config.to_dict())
        settings = build_lion_config({**arguments, **config.model, "pooling": config.pooling}, self.tokenizer, longest)
        if config.matryoshka_dims and max(config.matryoshka_dims) > settings.hidden_size:
            raise UserError(
                f"matryoshka_dims: {max(config.matryoshka_dims)} exceeds the vectors' {settings.hidden_size}"
            )
        if read is None or checkpoint is not None:  # whose weights follow
            model = LionEmbeddingModel(settings)
        else:
            stored, read.config = read.config, LionConfig(**lion_arguments(settings.to_dict()))
            model = embedding_model(read, stored)
            log.info(f"weights of {start}")
            its = {"pooling": stored.pooling, **prompts_of(read.embedding)} if read.embedding else {}
            now = {"pooling": config.pooling, **prompts_of({"prompts": config.prompts})}
            for name in its | now if its else ():
                if its.get(name) != now.get(name):
                    log.warning(
                        f"{start} was trained with {name}={its.get(name)!r}, and this run has {now.get(name)!r}"
                    )
            widen_horizons(model.lion, stored)
        set_state_passing(model.lion, config.state_passing)
        facts = {"prompts": config.prompts, "max_seq_len": config.max_seq_len}
        return LionEmbedder(model, self.tokenizer, self.retrievals, config.temperature, facts)

    def build_loaders(self, device_batch_size: int) -> "tuple[DataSpec, DataSpec]":
        from composer import DataSpec

        from src.embed import batches

        config = self.config
        microbatch = (config.device_train_microbatch_size, config.device_train_microbatch_tokens)
        collator = batches.Collator(
            self.dataset, self.tokenizer, self.limits, config.negatives, microbatch, config.packing
        )
        train = batches.train_loader(
            self.dataset, collator, device_batch_size, config.mixed_batches, config.train_loader.num_workers
        )
        texts = batches.EvaluationTexts(self.retrievals, self.tokenizer, self.limits, self.prompts)
        if texts.cut:
            log.info(f"evaluation reads {texts.cut:,} of {len(texts):,} texts only up to their maximum length")
        self.statistics = train.cut
        evaluation = batches.eval_loader(texts, self.tokenizer.pad_token_id, config.device_eval_batch_size)
        methods: dict[str, Any] = {
            "get_num_tokens_in_batch": batches.count_tokens,
            "get_num_samples_in_batch": batches.count_samples,
            "split_batch": batches.split_batch,
        }
        return DataSpec(train, **methods), DataSpec(evaluation, **methods)

    def callbacks(self) -> "list[Callback]":
        from src.embed.cache import GradientCache

        config = self.config
        return [GradientCache(config.seed, config.temperature, config.symmetric, config.matryoshka_dims)]

    def describe(self, model: "LionEmbedder") -> tuple[str, str]:
        sizes = model.config
        title = f"{sizes.mixer}, {sizes.num_hidden_layers} layers of {sizes.hidden_size}, {sizes.pooling} pooling"
        return title, f"{len(self.dataset):,} pairs of {', '.join(pairs.name for pairs in self.dataset.sources)}"
