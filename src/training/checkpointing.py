"""Checkpoints of a run: write them atomically, find them again, and check one before a run starts from it."""

import contextlib
import io
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from composer import Callback, Event, Logger, State, Time
from composer.utils import create_interval_scheduler, dist, reproducibility

from src.checkpoints.processors import differs, normalization, written
from src.checkpoints.reading import (
    OF_DECAYS,
    OF_FEATURES,
    OF_FUNCTIONS,
    OF_HEADS,
    OF_WEIGHTS,
    Checkpoint,
    changed,
    in_words,
    read_checkpoint,
)
from src.checkpoints.remote import checkpoint_step
from src.checkpoints.safe_load import is_valid_checkpoint, load_safely
from src.cli import log
from src.data.tokenizers import vocabulary_digest
from src.errors import RunFailed, UserError, reason, some
from src.files import BEST, LATEST, follow, link, sync_to_disk
from src.training.ranks import decide

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from src.training.config import RunConfig
    from src.training.trainer import AutocastModel

SAVED_AFTER = {Event.BATCH_END: Event.BATCH_CHECKPOINT, Event.EPOCH_END: Event.EPOCH_CHECKPOINT}  # and evaluation


class CheckpointWriter(Callback):
    """Save `folder/ep{epoch}-ba{batch}-rank0.pt` every `interval`, and `at_end`; latest-rank0.pt links to the newest.
    A file gets its final name only once it is complete on disk. All are deleted but the newest `keep`, and the one that
    best-rank0.pt links to; -1 keeps all. `uploads.busy`, a file that is being uploaded, is deleted later. A step is
    saved before it is evaluated, so that an evaluation that fails costs nothing; then `owes_evaluation`, which a run
    that resumes from it asks for. `after_evaluation`: it is saved after that, with the state of the random numbers.
    After a failed write the run continues and retries at the next interval; at its end it raises RunFailed."""

    def __init__(
        self,
        folder: Path,
        interval: str,
        keep: int,
        uploads: Any = None,
        at_end: bool = True,
        after_evaluation: bool = False,
    ):
        self.folder, self.uploads = folder, uploads
        self.keep, self.after_evaluation = keep, after_evaluation
        self.is_due = create_interval_scheduler(interval, include_end_of_training=at_end)
        self.saved_batch = -1
        self.ended = False  # whether the run was over at the saved step, which a callback may have brought about
        self.owes_evaluation = False
        self.next_save = Event.BATCH_CHECKPOINT

    def run_event(self, event: Event, state: State, logger: Logger) -> None:
        if event in SAVED_AFTER:
            self.next_save = SAVED_AFTER[event]
        elif event == Event.EVAL_BEFORE_ALL and not self.after_evaluation:
            self.owes_evaluation = True
            self._save_if_due(state, self.next_save)
        elif event in (Event.EVAL_AFTER_ALL, Event.EVAL_STANDALONE_END):
            self.owes_evaluation = False
        elif event in SAVED_AFTER.values():
            self._save_if_due(state, event)

    def _save_if_due(self, state: State, event: Event) -> None:
        if self.is_due(state, event) and (failure := self.save(state)):
            log.warning(f"{failure}; training continues and retries at the next save")

    def state_dict(self) -> dict[str, bool]:
        return {"owes_evaluation": self.owes_evaluation, "ended": self.ended}

    def load_state_dict(self, state: dict[str, bool]) -> None:
        self.ended = state.get("ended", False)
        self.owes_evaluation = state.get("owes_evaluation", False)  # earlier versions evaluated first

    def save(self, state: State) -> str | None:
        """Save this step unless it is already saved; return None, or why it failed. Every rank must call this."""
        batch = state.timestamp.batch.value
        if batch == self.saved_batch:
            return None
        finite = all(bool(torch.isfinite(parameter).all()) for parameter in state.model.parameters())
        if not all(dist.all_gather_object(finite)):
            raise RunFailed(f"step {batch}: some weights are non-finite and were not saved; {resume_hint(self.folder)}")
        self.ended = state.timestamp >= state.max_duration
        path = self.folder / f"ep{state.timestamp.epoch.value}-ba{batch}-rank0.pt"
        if (failure := self._write(state, path)) is None:
            self.saved_batch = batch
            if self.uploads is not None:
                self.uploads.notify()
            return None
        if state.timestamp < state.max_duration:
            return f"cannot save step {batch} to {path}: {failure}"
        failure = f"cannot save the last step, {batch}, to {path}: {failure}"
        raise RunFailed(f"{failure}; free disk space; {resume_hint(self.folder)}")

    def _write(self, state: State, path: Path) -> str | None:
        """Return None, or, on every rank, why rank 0 could not write the file."""
        torch.cuda.empty_cache()  # gathering sharded weights needs memory
        contents = {"state": state.state_dict(), "rng": reproducibility.get_rng_state()}  # every rank contributes
        return decide(lambda: self._publish(contents, path))

    def _publish(self, contents: dict[str, Any], path: Path) -> str | None:
        unfinished, file = path.with_suffix(".unfinished"), None
        try:
            with _File(unfinished) as file:
                torch.save(contents, file)
            sync_to_disk(unfinished)
            if not checkpoints(self.folder):
                check_loads(unfinished)
            unfinished.replace(path)
            link(path.with_name(LATEST), path.name)
            self.delete_old(path)
        except OSError as error:
            return reason(error)
        except RuntimeError:  # torch's, after a failed write
            if file is None or file.failure is None:
                raise
            return reason(file.failure)
        finally:
            with contextlib.suppress(OSError):
                unfinished.unlink(missing_ok=True)
        return None

    def delete_old(self, newest: Path) -> None:
        """Delete what is not to be kept once `newest` is saved. Raises OSError."""
        if self.keep < 1:
            return
        found, best = checkpoints(self.folder), follow(self.folder / BEST).resolve().name
        for old in found[found.index(newest) :][self.keep :]:  # any newer one is corrupt and was skipped
            if old.name != best and (self.uploads is None or self.uploads.busy != old):
                old.unlink()


class _File(io.FileIO):
    """A file that remembers why a write failed: torch raises another error on the way out."""

    failure: OSError | None = None

    def __init__(self, path: Path):
        super().__init__(path, "w")

    def write(self, data: bytes) -> int:
        try:
            data, written = memoryview(data).cast("B"), 0
            while written < len(data):
                written += super().write(data[written:])
            return written
        except OSError as error:
            self.failure = error
            raise


def check_loads(path: Path) -> None:
    """Raise RunFailed if a run could not resume from its own checkpoint."""
    try:
        load_safely(path)
    except UserError as error:
        problem = f"this run could not resume from its checkpoints: {error}"
        to_do = "let the state_dict of your own callbacks and algorithms hold tensors, numbers, text, lists and dicts"
        raise RunFailed(f"{problem}; {to_do}") from None


def checkpoints(folder: Path) -> list[Path]:
    """Return a run's checkpoints, newest first."""
    steps = {path: checkpoint_step(path.name) for path in folder.glob("ep*-rank0.pt")}
    return sorted((path for path in steps if steps[path] is not None), key=steps.get, reverse=True)


def delete_checkpoints(folder: Path) -> None:
    """Delete what a finished run no longer needs."""
    with contextlib.suppress(OSError):
        for path in (folder / LATEST, *checkpoints(folder)):
            path.unlink(missing_ok=True)


def latest_valid_checkpoint(folder: Path) -> Path | None:
    """Return the newest valid checkpoint, to which latest-rank0.pt then links. Raises UserError if all are corrupt."""
    found = checkpoints(folder)
    for path in found:
        if is_valid_checkpoint(path):
            if follow(folder / LATEST).resolve() != path.resolve():  # killed between file and link
                with contextlib.suppress(OSError):  # on a full disk, the next save reports it
                    link(folder / LATEST, path.name)
            return path
        log.warning(f"{path} is corrupt or truncated; skipped")
    if found:
        raise UserError(f"save_folder: no checkpoint in {folder} is valid; remove them or choose another folder")
    return None


def resume_hint(folder: Path) -> str:
    """Return what to do after a failure, as the end of a sentence. Every rank must call this."""
    latest = decide(lambda: next(filter(is_valid_checkpoint, checkpoints(folder)), None))
    return f"the same command resumes from {latest}" if latest else "no earlier checkpoint exists"


def check_load_path(run: "RunConfig", path: Path, model: "AutocastModel", optimizer: torch.optim.Optimizer) -> None:
    """Raise UserError for the file that `run.load_path` names, now at `path`, if the run cannot start from it."""
    name, config = f"load_path={run.load_path}", model.model.config
    if not is_valid_checkpoint(path):
        raise UserError(f"{name} is corrupt or truncated, or not a checkpoint; copy it again or give another")
    checkpoint = read_checkpoint(path)
    hint = f"use that run's config, or start from its weights alone with {run.weights_key}"
    shapes, its_shapes = ({n: w.shape for n, w in ws.items()} for ws in (model.model.state_dict(), checkpoint.weights))
    if shapes != its_shapes or checkpoint.published:
        keys = [in_words(*each) for each in changed(config, checkpoint.config, OF_WEIGHTS)]
        which = f" ({'; '.join(keys)})" if keys else ""
        raise UserError(f"{name} is a checkpoint of a different model than this config's{which}; {hint}")
    if keys := changed(config, checkpoint.config, (*OF_HEADS, *OF_FUNCTIONS, *OF_FEATURES, *OF_DECAYS)):
        which = "; ".join(in_words(*each) for each in keys)
        wide = ", which widens horizons" if "decay_horizon" in {key for key, *_ in keys} else ""
        raise UserError(f"{name} does not change its model: {which}; {hint}{wide}")
    if (its := _tokenizer(checkpoint)) and vocabulary_digest(its) != vocabulary_digest(model.tokenizer):
        raise UserError(f"tokenizer_name: another tokenizer than that of {name}; use that one")
    if model.processor is not None:
        check_classes(checkpoint, config.id2label, name, hint)
        its, own = normalization(checkpoint.processor), normalization(model.processor)
        if any(differs(its[key], own[key]) for key in its):
            settings = " ".join(f"{key}={written(value)}" for key, value in its.items())
            raise UserError(f"{name} was trained with another normalization of images; set {settings}")
    kind = type(optimizer).__qualname__
    its_groups = checkpoint.optimizers.get(kind, ())
    restored = _restored if run.load_position else lambda group: len(group["params"])
    settings, its_settings = ([restored(group) for group in groups] for groups in (optimizer.param_groups, its_groups))
    if settings != its_settings:
        if kind not in checkpoint.optimizers:
            which = f" ({kind} instead of {', '.join(checkpoint.optimizers) or 'none'})"
        elif len(settings) != len(its_settings) or not run.load_position:
            which = " (other groups of parameters: optimizer.filter_bias_norm_wd or optimizer.layer_lr_decay)"
        else:
            which = ""
            hint += ", or also with its optimizer's state by load_position=false"
        raise UserError(f"{name} was trained with a different optimizer than this config's{which}; {hint}")
    if run.load_position:
        check_remaining(
            checkpoint, run.max_duration, name, "use a longer one, or start at step 0 with load_position=false"
        )


def _tokenizer(checkpoint: Checkpoint) -> "PreTrainedTokenizerBase | None":
    """A checkpoint's tokenizer; None if it has none, or one that cannot be loaded, say without code of its own."""
    with contextlib.suppress(UserError):
        return checkpoint.load_tokenizer()
    return None


def check_classes(checkpoint: Checkpoint, classes: Mapping[int, str], name: str, to_do: str) -> None:
    """Raise UserError for a checkpoint that knows other `classes` than the data has, or gives them other numbers."""
    its, own = checkpoint.classes, list(classes.values())
    if its == own or (its is None and checkpoint.config.num_labels == len(own)):
        return
    its = checkpoint.class_names
    only = {"only the checkpoint has": {*its} - {*own}, "only the data has": {*own} - {*its}}
    differ = ", ".join(f"{words} {some(names)}" for words, names in only.items() if names)
    raise UserError(f"{name}: the classes differ from the data's ({differ or 'in their order'}); {to_do}")


def _restored(group: Mapping[str, Any]) -> list[Any]:
    """What loading a checkpoint restores in a group of an optimizer, whatever the config says."""
    others = (group.get(name) for name in ("eps", "weight_decay", "momentum"))
    return [group.get("initial_lr", group["lr"]), list(group.get("betas", ())), *others]


def check_remaining(checkpoint: Checkpoint, max_duration: str, name: str, to_do: str = "use a longer one") -> None:
    """Raise UserError for a checkpoint at or after the end of the run."""
    end = Time.from_timestring(max_duration)
    if (done := checkpoint.timestamp.get(end.unit.name.lower(), 0)) >= end.value:
        problem = f"{name} is at {done}{end.unit.value}, so max_duration={max_duration} leaves nothing to train"
        raise UserError(f"{problem}; {to_do}")
