"""Run by `hub_folder.verify` where only torch and transformers are: loads a folder as any user would, saves what it gives.

Arguments: the folder, one of transformers' auto classes, and a folder of work. Reads there inputs.safetensors and
texts.json, [[texts], longest text in tokens], and writes outputs.safetensors, and tokens.json if the folder has a tokenizer.
"""

import json
import sys
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file

folder, auto_class, work = Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
if (folder / "tokenizer_config.json").is_file():
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    texts, longest = json.loads((work / "texts.json").read_text())
    tokens = [dict(tokenizer(*text, truncation=True, max_length=longest)) for text in texts]
    (work / "tokens.json").write_text(json.dumps({"tokens": tokens, "vocabulary": tokenizer.get_vocab()}))
model = getattr(transformers, auto_class).from_pretrained(folder, trust_remote_code=True).eval()
with torch.no_grad():
    outputs = model(**load_file(work / "inputs.safetensors"))
save_file({name: tensor.contiguous() for name, tensor in outputs.items()}, work / "outputs.safetensors")
