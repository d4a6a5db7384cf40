"""Measure which precision trains faster on this CPU, since the processor's flags do not tell."""

import statistics
import time
from collections.abc import Sequence

import torch

from src.cli import log
from src.lion import LionConfig, LionForMaskedLM
from src.lion.cpu import keep_freed_memory, speed_up
from src.mlm.task import PretrainConfig
from src.training.config import load_config

STEPS = 6  # per precision, after one to warm up


def choose_precision(arguments: Sequence[str], vocab_size: int) -> str | None:
    """Return fp32 or amp_bf16 after alternately timing training steps of a model on random tokens.

    A precision among the arguments of main.py takes precedence; on a GPU, None leaves the choice to main.py.
    """
    config = load_config(PretrainConfig, "main.py", "", list(arguments))
    if config.precision or torch.cuda.is_available():
        return config.precision
    keep_freed_memory()
    model = LionForMaskedLM(LionConfig(vocab_size=vocab_size, **config.model))
    speed_up(model)
    ids = torch.randint(vocab_size, (config.global_train_batch_size, config.max_seq_len))
    labels = ids.where(torch.rand(ids.shape) < config.mlm_probability, -100)
    seconds: dict[str, list[float]] = {"fp32": [], "amp_bf16": []}
    for _ in range(1 + STEPS):
        for precision, times in seconds.items():
            start = time.perf_counter()
            with torch.autocast("cpu", torch.bfloat16, enabled=precision == "amp_bf16"):
                loss = model(input_ids=ids, labels=labels).loss
            loss.backward()
            model.zero_grad()
            times.append(time.perf_counter() - start)
    rates = {precision: ids.numel() / statistics.median(times[1:]) for precision, times in seconds.items()}
    faster = max(rates, key=rates.__getitem__)
    trial = ", ".join(f"{precision} {rate:,.0f}" for precision, rate in rates.items())
    log.info(f"{faster} is faster on this CPU (tokens per second in a trial: {trial})")
    return faster
