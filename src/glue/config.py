"""Config of fine-tuning on text: `glue.py`."""

from dataclasses import dataclass
from typing import Any

from src.config import SEED, key
from src.training.config import TrainerConfig


@dataclass
class FinetuneConfig(TrainerConfig):
    """Keys of `glue.py`."""

    base_run_name: str = key("name of the run; each job's name is this, its task and its seed")
    starting_checkpoint_load_path: str | None = key(
        "pretrained encoder: a checkpoint of main.py or of the paper's authors, a Hub folder, a Hugging Face BERT, or "
        "the Hub name of one; null: random weights",
        None,
    )
    from_scratch: bool = key(
        "take sizes and tokenizer from the starting checkpoint but not its weights: the baseline", False
    )
    model: dict[str, Any] = key("arguments of LionConfig that override those of the starting checkpoint", {})
    tokenizer_name: str | None = key("Hub name or folder; default: the starting checkpoint's tokenizer", None)
    glue_dir: str | None = key("folder with the official GLUE TSV files; default: nyu-mll/glue on the Hub", None)
    tasks: dict[str, Any] = key(
        "hyperparameters of each task that override src/glue/tasks.py, lists of values for a search; or your own tasks",
        {},
    )
    tasks_to_run: list[str] = key("names of tasks, in order; empty: the eight GLUE tasks", [])
    mnli_first: bool = key("start RTE, MRPC and STS-B from the encoder tuned on MNLI with its first seed", False)
    predict_test: bool = key("predict the GLUE test sets too, in files that its server takes", False)
    parallel: Any = key(
        "false: one job at a time; true: one per GPU or CPU core; or the number of parallel jobs", False
    )
    max_seq_len: int = key("maximum sequence length in tokens", 128)
    device_eval_batch_size: int = key("samples per evaluation batch", 128, at_least=1)
    default_seed: int = key("seed of tasks without seeds", 19, **SEED)
    save_finetuned_checkpoints: bool = key("keep the fine-tuned model of each job", False)
    rerun: bool = key("run finished jobs again; also as --rerun", False)
