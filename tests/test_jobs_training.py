"""Training of one job, whatever its task."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from composer import Callback
from composer.core import Precision
from composer.devices import DeviceCPU
from torch import Tensor, nn
from torch.utils.data import Dataset, default_collate
from transformers import PretrainedConfig

from src.errors import RunFailed
from src.files import METRICS, read_json_lines
from src.jobs import predictions
from src.jobs.config import JobsConfig
from src.jobs.experiment import Experiment
from src.jobs.tasks import Suite, Task
from src.jobs.training import Classifier, GroupedByLength, Split, count_tokens, loader, predict, train


class Signs(Dataset):
    """Numbers to classify by their sign."""

    def __init__(self, count: int, seed: int):
        self.numbers = torch.randn(count, generator=torch.Generator().manual_seed(seed))
        self.labels, self.lengths = (self.numbers > 0).long(), [1] * count

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        return {"numbers": self.numbers[number, None], "labels": self.labels[number]}


class Linear(nn.Module):
    """A model that is not the encoder."""

    def __init__(self):
        super().__init__()
        self.config, self.linear = PretrainedConfig(), nn.Linear(1, 2)

    def forward(self, numbers: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.linear(numbers)
        loss = {} if labels is None else {"loss": nn.functional.cross_entropy(logits, labels)}
        return loss | {"logits": logits}


def train_signs(folder, model: nn.Module, algorithms: dict | None = None, microbatch_size=None, **options) -> dict:
    signs = Task("signs", "Signs", ("accuracy",), ("-", "+"), 2, microbatch_size=microbatch_size)
    (task,) = Suite("Signs", "one", {"signs": signs}).select([], {}, 1)
    config = JobsConfig(
        scheduler={"name": "constant"}, save_folder=str(folder), base_run_name="signs", algorithms=algorithms or {}
    )
    job = Experiment.job(SimpleNamespace(config=config, folder=folder), task, 1, "cpu", data="of signs")
    assert job.settings["data"] == "of signs" and job.settings["task"].keys() == task.settings().keys()
    job.folder.mkdir(parents=True)

    def split(count: int, seed: int, shuffle_seed: int | None = None) -> Split:
        signs = Signs(count, seed)
        return Split(loader(signs, default_collate, 16, 0, shuffle_seed), signs.labels, range(count), str(seed))

    splits = split(400, 1, job.seed), {"validation": split(100, 2)}, {"test": split(50, 3)}
    build_model = partial(Classifier, model, None, use_logits=True)
    return train(config, job, "cpu", Callback(), build_model, *splits, **options)


def test_any_model_is_trained_and_scored_on_another_split_than_it_is_selected_by(tmp_path):
    def groups(model: nn.Module) -> torch.optim.Optimizer:
        linear = model.model.linear
        return torch.optim.SGD([{"params": [linear.weight]}, {"params": [linear.bias], "lr": 0.0}], 0.5)

    before = (model := Linear()).linear.bias.clone()
    result = train_signs(tmp_path, model, build_optimizer=groups, microbatch_size=8)
    assert torch.equal(model.linear.bias, before)
    assert result["scores"].keys() == result["test_texts"].keys() == {"test"}
    guesses, labels = predictions.read_tensors(tmp_path / "jobs/signs-1", "test", result["labels"])
    assert result["score"] == pytest.approx((guesses == labels).double().mean().item()) and result["score"] > 0.8
    assert result["majority"] <= 0.6 and not result["at_chance"]
    *_, last = [line["eval"] for line in read_json_lines(tmp_path / "jobs/signs-1" / METRICS) if "eval" in line]
    assert last == {"validation/accuracy": pytest.approx(result["selection"])}


@pytest.mark.parametrize("keep_checkpoint", [False, True])
@pytest.mark.parametrize("start", ["0dur", "0.5dur"])
def test_scores_are_those_of_the_averages_whether_a_checkpoint_is_kept_or_not(tmp_path, keep_checkpoint, start):
    seen = []

    class Averaged(Linear):
        def forward(self, numbers: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
            if not self.training:
                seen.append(self.linear.weight.detach().clone())
            return super().forward(numbers, labels)

    ema = {"ema": {"half_life": "100ba", "ema_start": start}}  # of 50 batches in two epochs
    train_signs(
        tmp_path, Averaged(), ema, keep_checkpoint=keep_checkpoint,
        build_optimizer=lambda model: torch.optim.SGD(model.parameters(), 0.5),
    )  # fmt: skip
    of_validation, after = seen[-1 - 4 - 7], seen[-1]  # the last evaluation, then 7 batches of validation, 4 of test
    assert torch.equal(of_validation, after)
    if keep_checkpoint:  # its averages, which `read_checkpoint` takes
        state = torch.load(tmp_path / "jobs/signs-1/latest-rank0.pt", weights_only=False)["state"]
        averages = dict(state["algorithms"])["EMA"]["ema_model"]["named_parameters_dict"]
        assert torch.equal(averages["model.linear.weight"], after)


def test_a_model_that_has_learned_nothing_is_at_chance(tmp_path):
    nn.init.zeros_((model := Linear()).linear.weight)
    result = train_signs(tmp_path, model, build_optimizer=lambda model: torch.optim.SGD(model.parameters(), 0.0))
    assert result["at_chance"] and 0.4 <= result["score"] <= 0.6


def test_a_constant_answer_is_chance_also_where_another_class_is_frequent_than_in_training(tmp_path, monkeypatch):
    class Constant(Linear):
        def forward(self, numbers: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
            return {**super().forward(numbers, labels), "logits": torch.tensor([1.0, 0.0]).expand(len(numbers), 2)}

    monkeypatch.setattr(Signs, "__init__", lambda self, count, seed: skewed(self, count, seed == 1))
    result = train_signs(tmp_path, Constant())
    assert result["majority"] == pytest.approx(0.2) and result["score"] == pytest.approx(0.8) and result["at_chance"]


def skewed(self: Signs, count: int, training: bool) -> None:
    """Of the training set, a fifth has label 0; of other sets, four fifths."""
    self.labels = (torch.arange(count) % 5 > (0 if training else 3)).long()
    self.numbers, self.lengths = 2.0 * self.labels - 1, [1] * count


def test_non_finite_predictions_fail_the_job():
    class Diverged(torch.nn.Module):
        def eval_forward(self, batch: torch.Tensor) -> torch.Tensor:
            return batch * float("nan")

    with pytest.raises(RunFailed, match="non-finite; set a smaller lr"):
        predict(Diverged(), [torch.ones(2)], DeviceCPU(), Precision.FP32)


def test_predictions_use_the_precision_of_evaluation_during_training(monkeypatch):
    """As Composer's context has it, which changes nothing where there is no GPU."""
    monkeypatch.setattr(
        "src.jobs.training.get_precision_context",
        lambda precision: torch.autocast("cpu", enabled=precision == Precision.AMP_BF16),
    )

    class Product(torch.nn.Module):
        def eval_forward(self, batch: torch.Tensor) -> torch.Tensor:
            return batch @ batch

    assert predict(Product(), [torch.ones(2, 2)], DeviceCPU(), Precision.AMP_BF16).dtype == torch.bfloat16


def test_padding_does_not_count_as_tokens():
    ids, mask = torch.ones(2, 5), torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]])
    batches = ({"input_ids": ids, "attention_mask": mask}, {"input_ids": ids}, {"x": ids})
    assert [count_tokens(batch) for batch in batches] == [7, 10, 0]


def test_training_batches_group_texts_of_similar_length_in_random_order(tokenizer):
    order = list(GroupedByLength([1 + i % 97 for i in range(801)], 8, seed=1))
    assert sorted(order) == list(range(801))
    batches = [[1 + i % 97 for i in order[at : at + 8]] for at in range(0, 800, 8)]
    assert sum(max(batch) - min(batch) for batch in batches) / len(batches) < 8  # of 97; about 75 without
    longest = [max(batch) for batch in batches]
    assert abs(torch.corrcoef(torch.tensor([longest, list(range(100))]).float())[0, 1]) < 0.3
