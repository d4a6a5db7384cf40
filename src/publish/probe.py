"""Load a folder as any user would and save what it computes; `folder.verify` runs this outside the repository.

Arguments: the folder, the auto class of the model, that of its processor, a working folder. Reads inputs.safetensors
and texts.json there; writes outputs.safetensors and report.json, where "tokens" is null if there is no tokenizer.
"""

import json
import sys
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file

folder, auto_class, processor, work = Path(sys.argv[1]), sys.argv[2], sys.argv[3], Path(sys.argv[4])
model = getattr(transformers, auto_class).from_pretrained(folder, trust_remote_code=True).eval()
report = {"tokens": None, "max_position_embeddings": model.config.max_position_embeddings}
if processor == "AutoTokenizer" and (folder / "tokenizer_config.json").is_file():
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    given = json.loads((work / "texts.json").read_text())
    tokens = [dict(tokenizer(*text, truncation=True, max_length=given["max_length"])) for text in given["texts"]]
    report["tokens"] = {"tokens": tokens, "vocabulary": tokenizer.get_vocab()}
    report["long"] = len(tokenizer(given["long"])["input_ids"])
    report["long_truncated"] = len(tokenizer(given["long"], truncation=True)["input_ids"])
(work / "report.json").write_text(json.dumps(report))
with torch.no_grad():
    outputs = model(**load_file(work / "inputs.safetensors"))
save_file({name: tensor.contiguous() for name, tensor in outputs.items()}, work / "outputs.safetensors")
