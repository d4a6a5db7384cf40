"""Load a folder as any user would; what it computes for work/inputs.pt goes to work/report.pt, for `folder.verify`."""

import sys
from pathlib import Path

import torch
import transformers

folder, auto_class, processor, work = sys.argv[1:]
given = torch.load(f"{work}/inputs.pt", weights_only=True)
model = getattr(transformers, auto_class).from_pretrained(folder, trust_remote_code=True).eval()
report = {"tokens": None, "max_position_embeddings": getattr(model.config, "max_position_embeddings", None)}
if processor == "AutoTokenizer" and Path(folder, "tokenizer_config.json").is_file():
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    tokens = [dict(tokenizer(*text, truncation=True, max_length=given["max_length"])) for text in given["texts"]]
    report["tokens"] = {"tokens": tokens, "vocabulary": tokenizer.get_vocab()}
    report["long"] = len(tokenizer(given["long"])["input_ids"])
    report["long_truncated"] = len(tokenizer(given["long"], truncation=True)["input_ids"])
elif processor == "AutoImageProcessor" and Path(folder, "preprocessor_config.json").is_file():
    from PIL import Image

    images = [Image.fromarray(image.numpy()) for image in given["images"]]
    prepare = transformers.AutoImageProcessor.from_pretrained(folder)
    report["pixels"] = prepare(images, return_tensors="pt")["pixel_values"]
with torch.no_grad():
    report["outputs"] = dict(model(**given["inputs"]))
torch.save(report, f"{work}/report.pt")
