"""Composer's Trainer, and what depends on the machine: device, precision, batch sizes, FSDP, compilation."""

import os
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from composer import Trainer
from composer.models import HuggingFaceModel, huggingface
from composer.utils import FSDPConfig
from composer.utils import checkpoint as composer_checkpoint
from torch import nn
from transformers.utils import logging as transformers_logging

from src.errors import UserError, first_line
from src.lion.cpu import flush_denormals
from src.lion.machine import keep_freed_memory
from src.training.loading import load_checkpoint
from src.training.registry import check_arguments
from src.training.run_log import library_messages


class AutocastModel(HuggingFaceModel):
    """A HuggingFaceModel that can compute in bfloat16 on a CPU, where Composer has no mixed precision of its own."""

    cpu_bfloat16 = False
    processor: Mapping[str, Any] | None = None  # settings of the image processor, if the model reads images
    embedding: Mapping[str, Any] | None = None  # prompts and max_seq_len, if the model was trained for embeddings

    def autocast(self) -> torch.autocast:
        return torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.cpu_bfloat16)

    def forward(self, batch: Mapping[str, Any]) -> Any:
        with self.autocast():
            return super().forward(batch)

    def get_metadata(self) -> dict[str, Any]:
        """Return what a checkpoint records about the model: its own class, even after FSDP has wrapped it."""
        metadata, model = super().get_metadata(), getattr(self.model, "module", self.model)
        metadata["model"]["config"]["class"] = f"{type(model).__module__}.{type(model).__name__}"
        if self.processor is not None:
            metadata["image_processor"] = dict(self.processor)
        if self.embedding is not None:
            metadata["embedding"] = dict(self.embedding)
        return metadata


def configure_process(device: str) -> None:
    """Silence libraries, and set this process up for training on a device."""
    silence_libraries()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # loader workers are the parallelism
    huggingface._is_registered_causal_lm = lambda model: False  # Composer's imports all causal models, for a second
    if device == "cpu":
        keep_freed_memory()
        flush_denormals()


def silence_libraries() -> None:
    """Hide messages of libraries that no user of this project can act on, and log Composer's and streaming's others."""
    transformers_logging.set_verbosity_error()
    warnings.filterwarnings("ignore", module=r"(torch|torchmetrics)\b.*")
    for category in (DeprecationWarning, FutureWarning):  # for programmers
        warnings.filterwarnings("ignore", category=category, module=r"(composer|streaming)\b.*")
    library_messages.start()


def resolve_device(device: str | None) -> str:
    """Return "gpu" or "cpu": as requested, or a GPU if there is one. Raises UserError if a requested GPU is missing."""
    available = "gpu" if torch.cuda.is_available() else "cpu"
    if device == "gpu" and available == "cpu":
        raise UserError("device=gpu, but no GPU is available; set device=cpu or omit it")
    return device or available


def resolve_precision(precision: str | None, device: str) -> str:
    """Return the training precision: the requested one, or amp_bf16 on a GPU and fp32 on a CPU. Raises UserError."""
    if precision == "amp_fp16" and device == "cpu":
        raise UserError("precision=amp_fp16 needs a GPU; set precision=amp_bf16 or fp32")
    return precision or ("amp_bf16" if device == "gpu" else "fp32")


def split_batch_size(global_batch: int, microbatch: Any, world_size: int, device: str) -> int:
    """Return the samples per device and step, of which a microbatch may hold more than there are. Raises UserError for
    sizes that do not divide evenly."""
    device_batch, rest = divmod(global_batch, world_size)
    if rest:
        problem = f"global_train_batch_size={global_batch} is not divisible by {world_size} devices"
        raise UserError(f"{problem}; use a multiple of {world_size}")
    if microbatch == "auto" and device != "gpu":
        raise UserError(f"device_train_microbatch_size=auto needs a GPU; give a number, such as {device_batch}")
    return device_batch


def resolve_compilation(given: Any, device: str, fsdp: Mapping[str, Any], compiles_well: bool) -> dict[str, Any] | None:
    """Return the arguments of torch.compile, or None. `auto` compiles on a GPU what compiles well: no FSDP."""
    if given == "auto":
        return {} if device == "gpu" and compiles_well and not fsdp else None
    return given


def check_sections(fsdp: Mapping[str, Any], compile_config: Mapping[str, Any], device: str) -> None:
    """Raise UserError for an fsdp_config that Composer ignores or rejects, or a compile_config that torch rejects."""
    check_arguments("fsdp_config", FSDPConfig, fsdp)
    if fsdp and device != "gpu":
        raise UserError("fsdp_config shards a model over GPUs, and this run is on a CPU; omit it")
    check_arguments("compile_config", torch.compile, compile_config)
    try:
        if compile_config:
            torch.compile(nn.Identity(), **compile_config)
    except Exception as error:  # an invalid backend, mode or option
        raise UserError(f"compile_config: torch.compile rejects these arguments: {first_line(error)}") from None


def build_trainer(
    model: nn.Module, *, device: str, precision: str, float32_matmul_precision: str = "highest", **arguments: Any
) -> Trainer:
    """Return Composer's Trainer; an `AutocastModel` itself casts to bfloat16 on a CPU."""
    silence_libraries()
    if device == "cpu" and precision == "amp_bf16":
        model.cpu_bfloat16 = True
        precision = "fp32"
    composer_checkpoint.load_checkpoint = load_checkpoint
    trainer = Trainer(model=model, device=device, precision=precision, progress_bar=False, **arguments)
    torch.set_float32_matmul_precision(float32_matmul_precision)  # Composer's GPU device has just allowed TF32
    return trainer
