"""YAML file + command-line overrides → one checked config. The dataclasses name every key, its type and its meaning."""

import argparse
import difflib
import os
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

import yaml
from omegaconf import II, DictConfig, OmegaConf
from omegaconf import MISSING as REQUIRED
from omegaconf.errors import InterpolationResolutionError, MissingMandatoryValue, OmegaConfBaseException

from src.cli import UserError, first_line

Config = TypeVar("Config")


def key(meaning: str, default: Any = REQUIRED) -> Any:
    """A key with its meaning for `--help`. Without a default it has to be given."""
    if isinstance(default, dict | list):
        return field(default_factory=lambda: type(default)(default), metadata={"meaning": meaning})
    return field(default=default, metadata={"meaning": meaning})


@dataclass
class DatasetConfig:
    local: str = key("folder with the shards, or the cache for `remote`", II("data_local"))
    remote: str | None = key(
        "where the shards lie (s3://, gs://, oci://, a path), if not in `local`", II("data_remote")
    )
    streams: dict[str, Any] = key(
        "several sources in place of `local` and `remote`, by name: each a local, a remote, a split (by default the one "
        "below) and one of proportion (share of an epoch), repeat (times an epoch) and choose (samples an epoch)",
        {},
    )
    split: str = key("sub-folder of the shards, e.g. train, train_small, val")
    tokenizer_name: str = key("Hub name or folder of the tokenizer", II("tokenizer_name"))
    max_seq_len: int = key("longest sequence in tokens; the rest of a text is cut off", II("max_seq_len"))
    mlm_probability: float = key("share of tokens to predict", II("mlm_probability"))
    whole_word_masking: bool = key("hide all pieces of a word or none", False)
    packing: bool = key("put several samples in a row of max_seq_len, kept apart, and keep apart the documents of rows made with --concat_tokens", False)  # fmt: skip
    pad_to_max_length: bool = key("pad rows to max_seq_len; else to the longest of the batch", False)
    shuffle: bool = key("new order in every epoch, by seed", False)
    seed: int = key("seed of order and masks", II("seed"))
    predownload: int | None = key("samples to fetch ahead of the one in use, with `remote`", None)
    cache_limit: str | None = key("most disk to use for the cache, e.g. 100gb", None)
    num_canonical_nodes: int | None = key(
        "fix the order of samples for this many nodes, whatever the real number", None
    )


@dataclass
class LoaderConfig:
    dataset: DatasetConfig = field(default_factory=DatasetConfig)
    drop_last: bool = key("leave out the last batch of an epoch if it is not full", False)
    num_workers: int = key("processes that prepare batches, beside the main one; 0: the main one does", 0)


@dataclass
class PretrainConfig:
    """Keys of `main.py`."""

    run_name: str = key("name of the run")
    model: dict[str, Any] = key(
        "sizes and mixer: any argument of LionConfig (below; src/lion/configuration_lion.py says what they mean); and pretrained_checkpoint, to go on from "
        "one of main.py, a Hub folder, a checkpoint of the paper's authors or a Hugging Face BERT",
        {},
    )
    tokenizer_name: str = key("Hub name or folder of the tokenizer")
    data_local: str = key("folder with the shards that src/convert_dataset.py wrote")
    data_remote: str | None = key("where the shards lie, if `data_local` is only a cache for them", None)
    max_seq_len: int = key("longest sequence in tokens")
    mlm_probability: float = key("share of tokens to predict in training")
    train_loader: LoaderConfig = field(default_factory=LoaderConfig)
    eval_loader: LoaderConfig = field(default_factory=LoaderConfig)

    optimizer: dict[str, Any] = key(
        "name (decoupled_adamw, adamw) and its arguments; with filter_bias_norm_wd: true, biases and norms have no weight decay"
    )
    scheduler: dict[str, Any] = key(
        "name (linear_decay_with_warmup, cosine_with_warmup, constant, constant_with_warmup, warmup_stable_decay) and its arguments"
    )
    algorithms: dict[str, Any] = key("by name, with arguments: gradient_clipping, …", {})
    callbacks: dict[str, Any] = key("by name, with arguments: speed_monitor, lr_monitor, memory_monitor, …", {})
    loggers: dict[str, Any] = key("by name, with arguments: tensorboard, wandb, mlflow, file", {})

    max_duration: str = key("how long to train: samples (sp), batches (ba), epochs (ep) or tokens (tok)")
    eval_interval: str = key("how often to evaluate")
    eval_first: bool = key("evaluate the untrained model too, for comparison", True)
    eval_subset_num_batches: int = key("batches of one evaluation; -1: all", -1)
    global_train_batch_size: int = key("samples of one optimizer step, over all devices")
    device_train_microbatch_size: Any = key("samples a device takes at a time, or auto (FSDP on GPUs)")
    device_eval_batch_size: int = key("samples a device evaluates at a time")
    precision: str | None = key("fp32, amp_bf16 or amp_fp16; by default amp_bf16 on a GPU and fp32 on a CPU", None)
    float32_matmul_precision: str = key(
        "highest, or high / medium: float32 products may use TF32 / bfloat16", "highest"
    )
    device: str | None = key("gpu or cpu; by default a GPU if there is one", None)
    seed: int = key("seed of weights, dropout, order and masks")

    save_folder: str = key("where checkpoints, curves and metrics go")
    save_interval: str = key("how often to save a checkpoint")
    save_num_checkpoints_to_keep: int = key("older ones are deleted; -1: keep all", -1)
    load_path: str | None = key("checkpoint to start from, with its optimizer and place in the data", None)
    autoresume: bool = key("go on from the last checkpoint in save_folder, if there is one", True)
    on_nonfinite_loss: str = key(
        "stop: end the run before such a step is saved; skip: leave out the step's update, and count it", "stop"
    )
    activation_checkpointing: bool = key(
        "keep only what goes into each layer, and compute the rest again in the backward pass: less memory, a third more work",
        False,
    )
    fsdp_config: dict[str, Any] = key(
        "arguments of Composer's FSDPConfig, to shard the model over GPUs; empty: DDP", {}
    )
    ddp_sync_strategy: str | None = key(
        "when DDP sums gradients: single_auto_sync (with the last microbatch, the default), multi_auto_sync, forced_sync",
        None,
    )
    dist_timeout: float = key("seconds that a device waits for the others before the run ends", 300.0)
    compile_config: Any = key("arguments of torch.compile for the model, {} for its defaults; null: not compiled", None)
    hf_export: str | None = key(
        "save, end: also write each checkpoint, or the last one, to save_folder/hub as a folder for the Hub", None
    )
    log_interval: str = key("how often to write a line to metrics.jsonl", "10ba")
    progress_bar: bool = key("show progress and time left", True)


@dataclass
class FinetuneConfig:
    """Keys of `glue.py`."""

    base_run_name: str = key("name of the run; each job is called by it, its task and its seed")
    starting_checkpoint_load_path: str | None = key("pretrained encoder: a checkpoint of main.py, one that the paper's authors published, a folder of ours or a BERT of Hugging Face, or the Hub name of one; none: random weights", None)  # fmt: skip
    from_scratch: bool = key(
        "take sizes and tokenizer from the starting checkpoint but not its weights: the baseline", False
    )
    model: dict[str, Any] = key("arguments of LionConfig, over those of the starting checkpoint", {})
    tokenizer_name: str | None = key("Hub name or folder; by default the one in the starting checkpoint", None)
    glue_dir: str | None = key("folder with the official GLUE TSV files; by default the Hub's nyu-mll/glue", None)
    tasks: dict[str, Any] = key("hyperparameters of each task, over those in src/glue/tasks.py, several values for a search; or tasks of one's own", {})  # fmt: skip
    tasks_to_run: list[str] = key("names of tasks, in order; empty: the eight of GLUE", [])
    mnli_first: bool = key("start RTE, MRPC and STS-B from the encoder tuned on MNLI with its first seed", False)
    predict_test: bool = key("predict GLUE's test sets too, in files that its server takes", False)
    parallel: Any = key("false: one job at a time; true: one on each GPU, or CPU core; or how many at a time", False)
    max_seq_len: int = key("longest sequence in tokens", 128)
    scheduler: dict[str, Any] = key("name and arguments, as in pretraining")
    algorithms: dict[str, Any] = key("by name, with arguments", {})
    callbacks: dict[str, Any] = key("by name, with arguments", {})
    loggers: dict[str, Any] = key("by name, with arguments", {})
    precision: str | None = key("fp32 or amp_bf16; by default amp_bf16 on a GPU and fp32 on a CPU", None)
    device: str | None = key("gpu or cpu; by default a GPU if there is one", None)
    device_eval_batch_size: int = key("samples evaluated at a time", 128)
    default_seed: int = key("seed of tasks that name none", 19)
    save_folder: str = key("where scores, the report and predictions go")
    save_finetuned_checkpoints: bool = key("keep each job's trained model", False)
    rerun: bool = key("run jobs again that are already done; also as --rerun", False)
    progress_bar: bool = key("show progress and time left", True)


def load(schema: type[Config], script: str, argv: list[str]) -> Config:
    """The config that a command line asks for: `script.py FILE.yaml [key=value ...]`.

    A file may name another with `inherit: other.yaml`, a path relative to itself, and states then only what differs.
    Raises UserError for a missing file, an unknown key, a value of the wrong type or a missing one.
    """
    arguments = _parse(schema, script, argv)
    try:
        given = OmegaConf.merge(_read(Path(arguments.yaml)), _overrides(arguments.overrides))
        _check_keys(given, schema)
        given = OmegaConf.create(_with_home(OmegaConf.to_container(given)))
        config = OmegaConf.merge(OmegaConf.structured(schema), given)
        # Of the top level first: resolving would stumble over what other keys refer to.
        _refuse_missing(
            [entry.name for entry in fields(schema) if OmegaConf.is_missing(config, entry.name)], arguments.yaml
        )
        OmegaConf.resolve(config)
        _refuse_missing(sorted(OmegaConf.missing_keys(config)), arguments.yaml)
        _refuse_braces(config)
        if arguments.print_config:
            print(OmegaConf.to_yaml(config), end="")
            raise SystemExit(0)
        return OmegaConf.to_object(config)
    except (InterpolationResolutionError, MissingMandatoryValue) as error:
        raise UserError(f"{arguments.yaml}: {first_line(error)}") from None
    except OmegaConfBaseException as error:
        raise UserError(f"{getattr(error, 'full_key', None) or arguments.yaml}: {first_line(error)}") from None


def _refuse_missing(missing: list[str], path: str) -> None:
    if missing:
        raise UserError(f"{path} leaves {', '.join(missing)} unset; set it there or as {missing[0]}=VALUE")


def _refuse_braces(config: DictConfig) -> None:
    for name in ("save_folder", "load_path"):
        if "{" in (value := config.get(name) or ""):
            raise UserError(f"{name}: {value} has braces, which Composer would replace; write ${{run_name}} for a key of the config")  # fmt: skip


def _with_home(given: Any) -> Any:
    """A config with the user's folder for the `~/` that a path begins with."""
    if isinstance(given, dict):
        return {name: _with_home(value) for name, value in given.items()}
    if isinstance(given, list):
        return [_with_home(value) for value in given]
    return os.path.expanduser(given) if isinstance(given, str) and given.startswith("~/") else given


def to_dict(config: Any) -> dict[str, Any]:
    """A config as plain dictionaries and lists, to be stored or compared."""
    return OmegaConf.to_container(OmegaConf.structured(config), resolve=True)


def nearest(name: str, known: list[str]) -> str:
    """', did you mean …?' for an unknown name, or the list of known ones where none is near."""
    tail = name.rsplit(".", 1)[-1]
    same_tail = [candidate for candidate in known if candidate.rsplit(".", 1)[-1] == tail]
    close = same_tail or difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    if close:
        return f"; did you mean {close[0]}?"
    return f"; known are {', '.join(sorted(known))}" if len(known) <= 20 else "; --help lists the keys"


class _Help(argparse.Action):
    """The keys at once, and then the arguments of what is chosen by name, which take seconds to import."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        parser.print_help()
        print("\narguments of model, and of what is chosen by name (in `callbacks` and the like as name: {argument: value}):\n", flush=True)  # fmt: skip
        from src import builders

        print(builders.arguments_by_name())
        parser.exit()


def _parse(schema: type, script: str, argv: list[str]) -> argparse.Namespace:
    example = "pretrain/lion-s-base.yaml max_duration=1000ba" if schema is PretrainConfig else "finetune-glue/lion-s-base.yaml tasks_to_run=[sst2,rte]"  # fmt: skip
    parser = argparse.ArgumentParser(
        prog=script,
        usage=f"{script} FILE.yaml [key=value ...] [--print_config]",
        description=f"Example: {script} yamls/{example}",
        epilog="keys, in the YAML file or as key=value (what stands after = is the default):\n\n" + describe(schema),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        add_help=False,
    )
    parser.add_argument("-h", "--help", action=_Help, nargs=0, help="show this and stop")
    parser.add_argument("yaml", metavar="FILE.yaml", help="the config, e.g. one of yamls/")
    parser.add_argument("overrides", metavar="key=value", nargs="*", help="values over those of the file")
    parser.add_argument("--print_config", action="store_true", help="print the whole resolved config and stop")
    return parser.parse_args(argv)


def describe(schema: type, prefix: str = "") -> str:
    """Every key of a schema with its default and meaning, a line or two each."""
    lines = []
    hints = get_type_hints(schema)
    for entry in fields(schema):
        if is_dataclass(hints[entry.name]):
            lines.append(describe(hints[entry.name], f"{prefix}{entry.name}."))
            continue
        default = entry.default_factory() if entry.default is MISSING else entry.default
        shown = "" if default == REQUIRED else f" = {'null' if default is None else default}"
        lines.append(f"  {prefix}{entry.name}{shown}\n        {entry.metadata['meaning']}")
    return "\n".join(lines)


def _read(path: Path, seen: tuple[Path, ...] = ()) -> DictConfig:
    """A YAML file merged over the one it inherits."""
    try:
        if not path.is_file():
            raise UserError(f"{path} is not a file; give the path of a YAML config, e.g. one of yamls/")
        config = OmegaConf.load(path)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not valid YAML: {error}") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror or error}); mend that, or give another file") from None
    if not isinstance(config, DictConfig):
        raise UserError(f"{path} must hold `key: value` lines")
    base = config.pop("inherit", None)
    if base is None:
        return config
    if not isinstance(base, str):
        raise UserError(f"{path}: inherit must name one file, not {base}")
    if path.resolve() in seen:
        raise UserError(f"{path} inherits itself; remove one `inherit:`")
    return OmegaConf.merge(_read(path.parent / base, (*seen, path.resolve())), config)


def _overrides(pairs: list[str]) -> DictConfig:
    for pair in pairs:
        if "=" not in pair:
            raise UserError(f"{pair!r} is not of the form key=value")
    try:
        return OmegaConf.from_dotlist(pairs)
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        raise UserError(f"cannot read the overrides {' '.join(pairs)}: {first_line(error)}") from None


def _check_keys(given: DictConfig, schema: type) -> None:
    hints = get_type_hints(schema)
    for name in given:
        if is_dataclass(hints.get(name)) and not isinstance(given[name], DictConfig):
            raise UserError(f"{name} must hold `key: value` lines, not {given[name]!r}")
    known = list(_schema_keys(schema))
    # What the free sections (optimizer, tasks, …) hold so far helps to place a key given without its section.
    hints = [name for name in _given_keys(given) if name not in known]
    for name in _given_keys(given):
        section = name.split(".")
        free = any(".".join(section[:depth]) in known for depth in range(1, len(section)))
        if name not in known and not free and not any(other.startswith(f"{name}.") for other in known):
            raise UserError(f"unknown key {name}{nearest(name, known + [hint for hint in hints if hint != name])}")


def _schema_keys(schema: type, prefix: str = ""):
    hints = get_type_hints(schema)
    for entry in fields(schema):
        if is_dataclass(hints[entry.name]):
            yield from _schema_keys(hints[entry.name], f"{prefix}{entry.name}.")
        else:
            yield prefix + entry.name


def _given_keys(config: Any, prefix: str = ""):
    for name in config:
        value = config._get_node(name)
        if isinstance(value, DictConfig) and not value._is_interpolation() and not value._is_none() and len(value):
            yield from _given_keys(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"
