"""Two processes shard a tiny model as Composer does, on CPUs, and compare it with an unsharded one.

python tests/fsdp_ranks.py TOKENIZER FILE, a new file through which the processes find each other.
"""

import copy
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
from composer import Time, Timestamp
from composer.distributed import prepare_fsdp_module
from composer.utils import FSDPConfig
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from src.lion import LionConfig
from src.mlm.model import LionMLM
from src.training.checkpointing import CheckpointWriter
from src.training.registry import build_optimizer
from src.training.text_model import build_tokenizer

tokenizer = build_tokenizer(sys.argv[1], 64)
other = os.fork()  # after the imports, which take seconds
os.environ |= {"RANK": str(int(other == 0)), "WORLD_SIZE": "2"}
torch.distributed.init_process_group("gloo", f"file://{sys.argv[2]}", rank=int(other == 0), world_size=2)
torch.cuda.current_device = lambda: torch.device("cpu")  # where Composer puts the shards

torch.manual_seed(0)
sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
unsharded = LionMLM(LionConfig(vocab_size=len(tokenizer), **sizes, **dropout), tokenizer)
sharded = copy.deepcopy(unsharded)
section = {"name": "decoupled_adamw", "lr": 1e-2, "weight_decay": 1e-5, "filter_bias_norm_wd": True}
optimizers = [build_optimizer(section, model) for model in (unsharded, sharded)]
prepare_fsdp_module(sharded, optimizers[1], FSDPConfig(activation_checkpointing=True), "fp32", "cpu")
units = sum(isinstance(module, FullyShardedDataParallel) for module in sharded.modules())
recomputed = sum("_checkpoint_wrapped_module" in name.rsplit(".", 1)[-1] for name, _ in sharded.named_modules())
assert (units, recomputed) == (3, 2), (units, recomputed)  # the two layers, and the model around them

ids = torch.randint(5, len(tokenizer), (4, 24))
batch = {
    "input_ids": ids,
    "attention_mask": torch.ones_like(ids),
    "labels": ids.where(torch.rand(ids.shape) < 0.3, -100),
}
evaluated = [model.eval().eval_forward(batch) for model in (unsharded, sharded)]
torch.testing.assert_close(evaluated[1], evaluated[0])

losses = []
for model, optimizer in zip((unsharded.train(), sharded.train()), optimizers):
    for _ in range(2):
        loss = model.loss(model(batch), batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    losses.append(loss)
torch.testing.assert_close(losses[1], losses[0])
gathered = get_model_state_dict(sharded, options=StateDictOptions(full_state_dict=True))
torch.testing.assert_close(dict(gathered), dict(unsharded.state_dict()), rtol=1e-4, atol=1e-5)

assert sharded.flops_per_batch(batch) == unsharded.flops_per_batch(batch)
assert sharded.get_metadata()["model"] == unsharded.get_metadata()["model"]

# A checkpoint of the shards: the ranks agree that it failed, and then that it did not.
folder = Path(f"{sys.argv[2]}-run")
folder.mkdir(exist_ok=True)
options = StateDictOptions(full_state_dict=True)  # Composer's, which copies to CPUs, crashes where there is no GPU
state = SimpleNamespace(model=sharded, timestamp=Timestamp(), max_duration=Time.from_timestring("10ba"))
state.state_dict = lambda: {"model": get_model_state_dict(sharded, options=options)}
writer = CheckpointWriter(folder, "1ba", keep=-1)
path = folder / "ep0-ba0-rank0.pt"
path.mkdir(exist_ok=True)  # rank 0 cannot rename a file to it
assert writer.save(state) == f"cannot save step 0 to {path}: Is a directory"
torch.distributed.barrier()
if other:  # rank 0
    path.rmdir()
torch.distributed.barrier()
assert writer.save(state) is None
assert writer.saved_batch == 0
saved = torch.load(folder / "latest-rank0.pt", weights_only=False)["state"]["model"]
torch.testing.assert_close(dict(saved), dict(unsharded.state_dict()), rtol=1e-4, atol=1e-5)
torch.distributed.destroy_process_group()
if other:
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(other, 0)[1]))
