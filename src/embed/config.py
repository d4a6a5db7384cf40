"""The keys of `embed.py`. Imports nothing slow."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from src.checkpoints.remote import check_exists
from src.cli import log
from src.config import Rule, check_known, check_value, duration, key
from src.data.tokenizers import check_path
from src.errors import UserError
from src.training.config import COUNT, RunConfig, check_state_passing, state_passing

SOURCE = ("files", "columns", "malformed_rows", "beir", "split", "prompts", "proportion")
COLUMNS = ("query", "document", "negatives", "passage")
KINDS = ("query", "document")


@dataclass
class WorkersConfig:
    num_workers: int = key("processes to prepare batches; 0: the main one", 0, at_least=0, below=2**32, may_change=True)


@dataclass
class EmbedConfig(RunConfig):
    """Keys of `embed.py`."""

    weights_key: ClassVar[str] = "starting_checkpoint_load_path"

    starting_checkpoint_load_path: str | None = key(
        "checkpoint of main.py or embed.py, Hub folder, Hugging Face BERT, or ModernBERT with global attention alone; "
        "null: random weights",
        None,
    )
    model: dict[str, Any] = key("arguments of LionConfig that replace the checkpoint's, or define a model", {})
    tokenizer_name: str | None = key("Hub name or folder of the tokenizer; null: the checkpoint's", None)
    data: dict[str, Any] = key(
        "sources by name, each with `files` (.jsonl, .csv, .tsv, .parquet) and `columns` (query, document, negatives: "
        "a column that holds a list, or a list of columns; passage: a column that holds [first, last], the character "
        "range of the passage to embed, or two columns), and `malformed_rows` (how many to skip in each file), or with "
        "`beir` (a folder) and `split` (train); and with `prompts` and `proportion` (of the batches; default: by size) "
        "of its own",
    )
    mixed_batches: bool = key("draw each batch from all sources; otherwise, from one of them", False)
    eval_data: list[str] = key("folders in BEIR's layout to evaluate on; empty: held-out pairs", [], may_change=True)
    eval_split: str = key("qrels of the folders in eval_data", "test", may_change=True)
    held_out: int = key("pairs of each source for evaluation, if eval_data is empty", 256, **COUNT)
    max_seq_len: int = key(
        "maximum length of documents in tokens; longer ones are truncated", at_least=3, at_most=2**32 - 1
    )
    query_max_seq_len: int = key(
        "maximum length of queries in tokens; longer ones are truncated", 512, at_least=3, at_most=2**32 - 1
    )
    pooling: str = key("how a text's token vectors become one vector", "mean", choices=("mean", "attention", "cls"))
    prompts: dict[str, Any] = key("text prepended to each `query` and each `document`", {})
    temperature: float = key("divisor of the cosine similarities in the loss", 0.02, above=0)
    symmetric: bool = key("average with the loss of retrieving each document's query", False)
    matryoshka_dims: list[int] = key(
        "vector sizes to train (Matryoshka); include the full size; empty: the full size only", []
    )
    negatives: int = key("negatives used for each query in a step, drawn from those it has", 7, at_least=0)
    packing: bool = key("pack texts of a microbatch into shared rows instead of padding them", False)
    state_passing: float = state_passing()
    device_train_microbatch_size: int | None = key(
        "texts (not pairs) per device and forward pass", None, at_least=1, may_change=True
    )
    device_train_microbatch_tokens: int | None = key(
        "tokens per device and forward pass, instead of device_train_microbatch_size", None, at_least=1, may_change=True
    )
    device_eval_batch_size: int = key("texts per device and evaluation batch", 32, may_change=True, **COUNT)
    train_loader: WorkersConfig = field(default_factory=WorkersConfig)
    max_duration: str = duration("length of training", units=("ba", "sp", "ep"), may_change=True)

    def check(self) -> None:
        super().check()
        if (self.device_train_microbatch_size is None) == (self.device_train_microbatch_tokens is None):
            raise UserError("set one of device_train_microbatch_size (texts) and device_train_microbatch_tokens")
        if self.eval_subset_num_batches != -1:
            raise UserError("eval_subset_num_batches: rankings need all texts; omit it, or lower held_out")
        check_state_passing(self.state_passing, self.packing, "packing", self.device_train_microbatch_size)
        if not self.data:
            raise UserError("data has no sources; add one, such as data.pairs.files=[pairs.jsonl]")
        check_prompts("prompts", self.prompts)
        for name, source in self.data.items():
            if "/" in str(name):
                raise UserError(f"data.{name}: the name of a source names its file too, so it cannot hold a slash")
            check_source(f"data.{name}", source)
            if self.pooling == "cls" and "passage" in source.get("columns", {}):
                hint = "pooling=cls cannot embed passages; set pooling to mean or attention"
                raise UserError(f"data.{name}.columns.passage: {hint}")
        given = [name for name, source in self.data.items() if source.get("proportion") is not None]
        if given and self.mixed_batches:
            raise UserError(f"data.{given[0]}.proportion has no effect with mixed_batches=true; omit it")
        if given and len(given) < len(self.data):
            raise UserError(f"data.{given[0]}.proportion: only some sources set proportion; set it for all or none")
        for number in self.matryoshka_dims:
            check_value("matryoshka_dims", number, int, Rule(at_least=1))
        if self.negatives and not any("negatives" in source.get("columns", {}) for source in self.data.values()):
            log.warning(
                f"negatives={self.negatives} has no effect: no source sets columns.negatives; set it, or negatives=0"
            )

    def check_data_paths(self) -> None:
        """Raise UserError for a file or folder that does not exist."""
        from src.data.readers import find_files

        for name, source in self.data.items():
            if "files" in source:
                find_files(patterns(source), f"data.{name}.files")
            elif not Path(source["beir"]).is_dir():
                raise UserError(f"data.{name}.beir: {source['beir']} is not a folder; fix its path")
        for folder in self.eval_data:
            if not Path(folder).is_dir():
                raise UserError(f"eval_data: {folder} is not a folder; fix its path")
        if self.tokenizer_name is not None:
            check_path(self.tokenizer_name, "tokenizer_name")
        start = self.starting_checkpoint_load_path
        check_exists(start, "starting_checkpoint_load_path")
        if start is None and self.tokenizer_name is None:
            raise UserError("random weights need a tokenizer; set tokenizer_name, or starting_checkpoint_load_path")


def patterns(source: dict[str, Any]) -> list[str]:
    files = source["files"]
    return [files] if isinstance(files, str) else list(files)


def check_source(name: str, source: Any) -> None:
    """Raise UserError for a source that cannot be read as one."""
    if not isinstance(source, dict) or ("files" in source) == ("beir" in source):
        raise UserError(f"{name} must be a section with either files or beir; add one")
    check_known(name, source, SOURCE)
    if "beir" in source:
        if of_files := [given for given in ("columns", "malformed_rows") if given in source]:
            raise UserError(f"{name}.{of_files[0]}: a BEIR folder has columns of its own; omit it")
    elif "split" in source:
        raise UserError(f"{name}.split applies only to beir sources; omit it")
    else:
        columns = source.get("columns", {})
        if not isinstance(columns, dict):
            raise UserError(f"{name}.columns must be a section, such as columns: {{query: question, document: answer}}")
        check_known(f"{name}.columns", columns, COLUMNS)
        for column, given in columns.items():
            several = isinstance(given, list) and all(isinstance(one, str) for one in given)
            allowed = several and (column == "negatives" or (column == "passage" and len(given) == 2))
            if not isinstance(given, str) and not allowed:
                hint = {"negatives": " or a list of names", "passage": " or two names"}.get(column, "")
                raise UserError(f"{name}.columns.{column} must be the name of a column{hint}")
        files = source["files"]
        if not files or not (isinstance(files, str) or all(isinstance(file, str) for file in files)):
            raise UserError(f"{name}.files must be a pattern or a list of patterns, such as data/*.jsonl")
    check_value(f"{name}.malformed_rows", source.get("malformed_rows", 0), int, Rule(at_least=0))
    check_prompts(f"{name}.prompts", source.get("prompts", {}))
    if source.get("proportion") is not None:
        check_value(f"{name}.proportion", source["proportion"], float, Rule(above=0))


def check_prompts(name: str, prompts: Any) -> None:
    if not isinstance(prompts, dict):
        raise UserError(f"{name} must be a section, such as prompts: {{query: 'search_query: '}}")
    check_known(name, prompts, KINDS)
    for kind, text in prompts.items():
        if isinstance(text, dict):  # YAML's reading of text that ends in a colon
            raise UserError(
                f"{name}.{kind} must be text, in quotes of its own: '{name}.{kind}=\"{next(iter(text), '')}: \"'"
            )
        check_value(f"{name}.{kind}", text, str)
