"""Read on one rank what all of them start from: a run's checkpoint, or a pretrained model."""

import io
import os
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from composer import Logger, State
from composer.devices import Device
from composer.utils import dist

from src.checkpoints.reading import Checkpoint, read_pretrained
from src.checkpoints.remote import FETCHED, fetch, is_remote
from src.checkpoints.safe_load import load_safely
from src.cli import is_main_process
from src.training.ranks import decide, on_each_machine, on_rank_0, several

SHARDED = ("model", "optimizers")  # what FSDP can take from rank 0 when it shards the model
# What a run's state has besides its weights, optimizer and algorithms.
POSITION = (
    "timestamp", "schedulers", "dataset_state", "callbacks", "rank_zero_seed", "train_metrics", "eval_metrics",
)  # fmt: skip


def read_start(name: str, key: str, resumed: Path | None, **how: Any) -> Checkpoint:
    """Return `read_pretrained(name, key, **how)`, downloaded once per machine; of a run that resumes, what its own
    checkpoint says of the model, without weights, since `load_checkpoint` loads them. Every rank must call this."""
    if resumed is not None:  # what the run started from may be gone
        return decide(lambda: replace(read_pretrained(str(resumed), key, **how), weights={}))
    if is_remote(name):
        os.environ[FETCHED] = on_each_machine(lambda: fetch(name, key) and os.environ[FETCHED])
    return read_pretrained(name, key, **how)


def position_in_data(checkpoint: Path) -> dict[str, Any]:
    """Return what the training data had stored in a checkpoint. Every rank must call this. Raises UserError."""
    return decide(lambda: load_safely(checkpoint)["state"].get("dataset_state", {}).get("train") or {})


def load_checkpoint(
    path: str, state: State, logger: Logger, algorithm_passes: Any = None, ignore_keys: Any = None, **_: Any
) -> Any:
    """Restore a run, in place of Composer's function, with which every rank reads the file and unpickles what it names.
    ignore_keys: names in the state to leave as they are, and the states of the random number generators, which it
    returns otherwise. Raises UserError."""
    contents = on_rank_0(lambda: load_safely(Path(path), mapped=False))  # the optimizer keeps the tensors
    if several():
        kept = {}
        if state.load_monolith_rank0_only and is_main_process():
            kept = {name: contents["state"][name] for name in SHARDED}
            contents["state"] |= dict.fromkeys(SHARDED)
        contents = send(contents, state.device)
        contents["state"] |= kept
    for name in ignore_keys or ():
        contents["state"].pop(name, None)
    state.load_state_dict(contents["state"], logger, algorithm_passes=algorithm_passes)
    return None if ignore_keys else contents.get("rng")


def send(contents: Any, device: Device) -> Any:
    """Return on every rank what `contents` is on rank 0. Tensors are sent one at a time, through `device`."""
    if is_main_process():
        pickler = _Pickler(file := io.BytesIO())
        pickler.dump(contents)
        dist.broadcast_object_list([file.getvalue()])
        for tensor in pickler.tensors:
            dist.broadcast(device.tensor_to_device(tensor.contiguous()), src=0)
        return contents
    received: list[Any] = [None]
    dist.broadcast_object_list(received)
    return _Unpickler(io.BytesIO(received[0]), device).load()


class _Pickler(pickle.Pickler):
    """Keeps tensors apart, in the order in which they are read again."""

    def __init__(self, file: io.BytesIO):
        super().__init__(file)
        self.tensors: list[torch.Tensor] = []

    def persistent_id(self, value: Any) -> tuple[torch.dtype, torch.Size] | None:
        if not isinstance(value, torch.Tensor):
            return None
        self.tensors.append(value)
        return value.dtype, value.shape


class _Unpickler(pickle.Unpickler):
    """Receives a tensor from rank 0 wherever it comes across one."""

    def __init__(self, file: io.BytesIO, device: Device):
        super().__init__(file)
        self.device = device

    def persistent_load(self, key: tuple[torch.dtype, torch.Size]) -> torch.Tensor:
        tensor = self.device.tensor_to_device(torch.empty(key[1], dtype=key[0]))
        dist.broadcast(tensor, src=0)
        return tensor.cpu()
