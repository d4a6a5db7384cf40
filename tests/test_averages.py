"""Moving averages of weights: their definition, what is evaluated, and weights that are one."""

from types import SimpleNamespace

import pytest
import torch
from composer import Callback, Time, Timestamp
from composer.models import ComposerClassifier
from torch.utils.data import DataLoader

import main
from src.checkpoints.reading import read_checkpoint
from src.training.registry import build_all
from src.training.trainer import build_trainer


def test_averages_are_their_definition_and_are_evaluated():
    torch.manual_seed(0)
    dataset = torch.utils.data.TensorDataset(torch.randn(6, 3), torch.tensor([0, 1] * 3))
    network = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))
    seen = {"trained": [], "evaluated": []}

    def weights(state):
        return {name: x.detach().clone() for name, x in state.model.state_dict().items() if x.is_floating_point()}

    class Record(Callback):
        def batch_end(self, state, logger):
            seen["trained"].append(weights(state))

        def eval_batch_end(self, state, logger):
            seen["evaluated"].append(weights(state))

    loader = torch.utils.data.DataLoader(dataset, batch_size=2)
    trainer = build_trainer(
        ComposerClassifier(network, num_classes=2),
        device="cpu",
        precision="fp32",
        train_dataloader=loader,
        eval_dataloader=torch.utils.data.DataLoader(dataset, batch_size=6),
        optimizers=torch.optim.SGD(network.parameters(), lr=0.5),
        max_duration="6ba",
        eval_interval="2ba",
        algorithms=build_all("algorithms", {"ema": {"half_life": "3ba"}}),
        callbacks=[Record()],
    )
    trainer.fit()
    kept, averages = 2 ** (-1 / 3), []
    for now in seen["trained"]:
        before = averages[-1] if averages else now
        averages.append({name: kept * before[name] + (1 - kept) * x for name, x in now.items()})
    assert len(averages) == 6 and len(seen["evaluated"]) == 3
    for expected, found in zip(averages[1::2], seen["evaluated"]):
        for name, x in expected.items():
            torch.testing.assert_close(found[name], x)
    trainer.close()


def test_averages_start_at_a_fraction_of_a_run_in_epochs():
    (averages,) = build_all("algorithms", {"ema": {"half_life": None, "smoothing": 0.9, "ema_start": "0.5dur"}})
    for batch, started in ((0, False), (49, False), (50, True), (99, True)):
        now = Timestamp(batch=batch, batch_in_epoch=batch, sample_in_epoch=batch)
        state = SimpleNamespace(max_duration=Time(1, "ep"), train_dataloader=DataLoader(range(100)), timestamp=now)
        assert averages._should_start(state) == started


@pytest.mark.slow
def test_averages_of_word_embeddings_are_also_those_of_the_decoder(tmp_path, write_config):
    main.main([str(write_config(tmp_path, max_duration="3ba", algorithms={"ema": {"half_life": "2ba"}}, loggers={}))])
    checkpoint = tmp_path / "run" / "latest-rank0.pt"
    trained = torch.load(checkpoint, weights_only=False)["state"]["model"]
    model = read_checkpoint(checkpoint).build()
    embeddings = model.lion.embeddings.word_embeddings.weight
    assert model.head.decoder.weight is embeddings
    assert not torch.equal(embeddings, trained["model.lion.embeddings.word_embeddings.weight"])
