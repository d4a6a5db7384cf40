"""Image classification: the task that `src/training/run.py` runs."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from src.cli import log
from src.config import check_known
from src.data.config import check_images
from src.errors import UserError
from src.training.task import Curve, Task
from src.vision.config import VisionConfig

if TYPE_CHECKING:
    from composer import DataSpec

    from src.checkpoints.reading import Checkpoint
    from src.data.images import Images
    from src.lion import LionVisionConfig
    from src.vision.model import LionImageClassifier

CURVES = (
    Curve("loss", "loss", "eval/CrossEntropy", "loss/train/total", unit="nats per image"),
    Curve("top1", "top-1 accuracy", "eval/Top1", percent=True),
    Curve("top5", "top-5 accuracy", "eval/Top5", percent=True),
    Curve("majority", "most frequent class", "eval/MajorityAccuracy", percent=True, baseline=True),
)


class Vision(Task):
    """Train an image classifier."""

    command = "vision.py"
    curves = CURVES
    counts = "images"

    def __init__(self, config: VisionConfig):
        super().__init__(config)
        self.sample = f"images of {config.size[0]}×{config.size[1]} pixels"

    def check_paths(self) -> None:
        super().check_paths()
        config = self.config
        for loader in (config.train_loader, config.eval_loader):
            if config.data_remote is None:
                check_images("data_local", config.data_local, loader.split)

    def build_model(self, checkpoint: Path | None) -> "LionImageClassifier":
        """Return a model with random weights, or with those of `model.pretrained_checkpoint`."""
        from src.checkpoints.adapters import IMAGE_ARGUMENTS
        from src.checkpoints.processors import processor_settings
        from src.data.images import Renumbered
        from src.lion import LionForImageClassification
        from src.training.loading import read_start
        from src.training.ranks import decide
        from src.vision.model import LionImageClassifier, token_count
        from src.vision.teachers import read_teacher

        config = self.config
        self.data = {loader.split: self.open(loader.split) for loader in (config.train_loader, config.eval_loader)}
        train, evaluation = (self.data[loader.split] for loader in (config.train_loader, config.eval_loader))
        classes = train.classes
        if unknown := sorted({*evaluation.classes} - {*classes}):
            found = f"{evaluation.source} has classes that {train.source} lacks"
            raise UserError(f"data_local: {found} ({', '.join(unknown[:5])}); use the same in both")
        if absent := sorted({*classes} - {*evaluation.classes}):
            shown = ", ".join(absent[:5]) + (", …" if len(absent) > 5 else "")
            log.warning(f"{evaluation.source} has no images of {len(absent)} of {len(classes)} classes: {shown}")
        if evaluation.classes != classes[: len(evaluation.classes)]:
            self.data[config.eval_loader.split] = Renumbered(evaluation, classes)
        if checkpoint is not None:
            decide(lambda: check_resumed(checkpoint, dict(enumerate(classes))))
        section = {name: value for name, value in config.model.items() if value is not None}  # null: the default
        check_known("model", section, (*IMAGE_ARGUMENTS, "pretrained_checkpoint"))
        start = section.pop("pretrained_checkpoint", None)
        read = None
        if start is not None:
            given = {*section, *(name for name in ("mean", "std") if getattr(config, name) is not None)}
            read = read_start(start, "model.pretrained_checkpoint", checkpoint, reads="images", given=given)
            trust(section, read)
            section = {**image_arguments(read.config.to_dict(), section.get("mixer")), **section}
        config.mean, config.std = decide(lambda: choose_normalization(config, read))
        self.processor = processor_settings(config.image_size, config.crop_pct, config.mean, config.std)
        model = LionForImageClassification(build_vision_config(section, config.image_size, classes))
        if read is not None and checkpoint is None:
            log.info(f"weights of {start}{load_weights(model, read)}")
        self.max_tokens_per_sample = token_count(model.config, config.size)
        teacher = None
        if (name := config.distillation.teacher) is not None:
            teacher = read_teacher(name, classes, self.processor)
            log.info(f"teacher: {name}, {config.distillation.kind} distillation")
        for part in config.freeze:
            frozen = [parameter for name, parameter in model.named_parameters() if part in name]
            if not frozen:
                raise UserError(f"freeze: no parameter has {part} in its name; omit it")
            for parameter in frozen:
                parameter.requires_grad_(False)
        if not any(parameter.requires_grad for parameter in model.parameters()):
            raise UserError(f"freeze=[{','.join(config.freeze)}] leaves no parameter to train; omit a part")
        return LionImageClassifier(model, self.processor, config.loss, config.distillation, teacher)

    def open(self, split: str) -> "Images":
        from src.data.images import open_images

        return open_images(self.config.data_local, split, self.config.data_remote)

    def build_loaders(self, device_batch_size: int) -> "tuple[DataSpec, DataSpec]":
        from composer import DataSpec

        from src.data import image_loader
        from src.data.image_transforms import Augmentation, Evaluation

        config = self.config
        train, evaluation = (self.data[loader.split] for loader in (config.train_loader, config.eval_loader))
        transform = Evaluation(self.processor)
        augmentation = Augmentation(config.augmentation, transform, config.size)
        mixing = image_loader.Mixing(config.mixing, len(train.classes), config.loss.smoothing, config.seed)
        loaders = (
            image_loader.train_loader(
                image_loader.ImageDataset(train, augmentation, config.seed),
                config.train_loader,
                device_batch_size,
                mixing,
            ),
            image_loader.eval_loader(
                image_loader.ImageDataset(evaluation, transform), config.eval_loader, config.device_eval_batch_size
            ),
        )
        tokens = self.max_tokens_per_sample
        count = {"get_num_tokens_in_batch": lambda batch: tokens * len(batch["labels"])}
        return tuple(DataSpec(loader, **count) for loader in loaders)

    def describe(self, model: "LionImageClassifier") -> tuple[str, str]:
        sizes, train = model.config, self.data[self.config.train_loader.split]
        order = f" in {sizes.patch_order}" if sizes.num_orders > 1 else ""
        title = f"{sizes.mixer}{order}, {sizes.num_hidden_layers} layers of {sizes.hidden_size}"
        return title, f"{len(train):,} images in {len(train.classes):,} classes of {train.source}"


def check_resumed(checkpoint: Path, classes: dict[int, str]) -> None:
    """Raise UserError unless a run's own checkpoint has these classes, since `data_local` may change."""
    from src.checkpoints.reading import read_checkpoint
    from src.training.checkpointing import check_classes

    to_do = "give the data that it was trained on, or start a new run from it with model.pretrained_checkpoint"
    check_classes(read_checkpoint(checkpoint), classes, f"data_local, to resume from {checkpoint}", to_do)


def trust(section: dict[str, Any], start: "Checkpoint") -> None:
    """Let arguments of a model replace what was guessed of the one that it starts from."""
    for name in start.guessed.keys() & section.keys():
        log.info(f"model.{name}={section[name]} as given, since {start.path} does not name it")
        setattr(start.config, name, section[name])


def choose_normalization(config: VisionConfig, start: "Checkpoint | None") -> list[list[float]]:
    """Return the mean and the standard deviation of the channels: the config's, or else as the model that it starts
    from was trained, or as ImageNet's. Either may be given alone."""
    from src.checkpoints.processors import MEAN, STD, differs, normalization, written

    its = {"mean": list(MEAN), "std": list(STD)} if start is None else normalization(start.processor)
    given = {name: value for name in its if (value := getattr(config, name)) is not None}
    for name, value in given.items():
        if start is not None and name not in start.guessed and differs(value, its[name]):
            instead = f"set {name}=null to normalize images as it was trained"
            log.warning(f"{name}={written(value)}, where {start.path} has {written(its[name])}; {instead}")
    chosen = its | given
    if start is not None:
        log.info(f"images are normalized with mean={written(chosen['mean'])} std={written(chosen['std'])}")
    return list(chosen.values())


def build_vision_config(
    arguments: dict[str, Any], image_size: int | list[int], classes: list[str]
) -> "LionVisionConfig":
    """Return the configuration of a classifier. Raises UserError for arguments that it does not have or rejects."""
    from src.checkpoints.adapters import IMAGE_ARGUMENTS, check_trainable
    from src.lion import LionVisionConfig
    from src.lion.configuration_lion import DECAYING
    from src.training.text_model import check_arguments

    check_arguments("model", arguments, IMAGE_ARGUMENTS)
    if arguments.get("num_channels", 3) != 3:
        raise UserError(f"model.num_channels={arguments['num_channels']}: vision.py reads all images as RGB; omit it")
    if len(classes) < 2:
        raise UserError(f"the data has one class, {''.join(classes)}, and a classifier needs two; name other data")
    names = {"id2label": dict(enumerate(classes)), "label2id": {name: number for number, name in enumerate(classes)}}
    try:
        config = LionVisionConfig(**{**arguments, "image_size": image_size}, **names)
    except ValueError as error:
        raise UserError(f"model: {error}") from None
    check_trainable(config)
    if config.num_orders > 1 and config.mixer not in DECAYING:
        log.warning(f"model.patch_order={config.patch_order} changes nothing for {config.mixer}, which has no decays")
    return config


def image_arguments(settings: dict[str, Any], mixer: str | None = None) -> dict[str, Any]:
    """Return those settings of a stored configuration that are arguments of LionVisionConfig, but the image size; for
    another mixer than its own, also without those whose defaults depend on it."""
    from src.checkpoints.adapters import IMAGE_ARGUMENTS
    from src.lion.configuration_lion import LINEAR, OPTIONS

    omitted = {"image_size"}
    if mixer not in (None, settings["mixer"]):
        omitted |= {"class_token", "patch_order", *(name for name, having in OPTIONS.items() if {*having} <= {*LINEAR})}
    return {name: settings[name] for name in IMAGE_ARGUMENTS if name in settings and name not in omitted}


def load_weights(model: Any, start: "Checkpoint") -> str:
    """Load a checkpoint into a model: position embeddings are resized to its images, and a classifier of other classes
    stays random. Return what is new, in words. Raises UserError for weights that do not fit."""
    from src.checkpoints.reading import load_all
    from src.lion.modeling_lion_vision import resize_positions

    own, weights, notes = model.config, dict(start.weights), ""
    name = "lion.embeddings.position_embeddings.weight"
    if name in weights and own.has_positions and own.grid != start.config.grid:
        weights[name] = resize_positions(weights[name], start.config.grid, own.grid, start.config.num_prefix_tokens)
        notes += f", position embeddings resized from {start.config.grid} to {own.grid} patches"
    random = model.state_dict()
    unnamed = start.classes is None and start.config.num_labels == own.num_labels
    same_classes = unnamed or own.id2label == start.config.id2label
    heads = [head for head in random if head.startswith(("classifier.", "distillation_classifier."))]
    if not same_classes or any(head not in weights for head in heads):
        weights = {part: tensor for part, tensor in weights.items() if part.startswith("lion.")}
        weights |= {head: random[head] for head in heads}
        notes += ", with a new classifier"
    load_all(model, weights, str(start.path), start.config)
    return notes
