"""Load a folder as any user would; what it computes for work/inputs.pt goes to work/report.pt, for `folder.verify`."""

import json
import sys
from importlib.util import find_spec
from pathlib import Path

import torch
import transformers

sys.modules["wandb"] = None  # timm would import it, for two seconds
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
    if "embed" in given:  # as sentence-transformers gives them, where it is installed
        if find_spec("sentence_transformers"):
            from sentence_transformers import SentenceTransformer

            encoder = SentenceTransformer(folder, device="cpu", trust_remote_code=True)
            options = {"convert_to_tensor": True, "show_progress_bar": False}
            vectors = [encoder.encode(text, **options) for text in given["embed"]]
            encoder.max_seq_length = given["longest"]
            report["vectors"] = torch.stack([*vectors, encoder.encode(given["long"], **options)])
            report["encoder"] = "sentence-transformers"
        else:
            limit = json.loads(Path(folder, "sentence_bert_config.json").read_text())["max_seq_length"]
            lengths = [limit] * len(given["embed"]) + [given["longest"]]
            report["vectors"], report["encoder"] = [], "transformers"
            for text, most in zip([*given["embed"], given["long"]], lengths):
                ids = tokenizer(text, truncation=True, max_length=most, return_tensors="pt")["input_ids"]
                with torch.no_grad():
                    vector = model(ids).pooler_output[0]
                report["vectors"].append(vector / vector.norm())
            report["vectors"] = torch.stack(report["vectors"])
elif processor == "AutoImageProcessor" and Path(folder, "preprocessor_config.json").is_file():
    from PIL import Image

    images = [Image.fromarray(image.numpy()) for image in given["images"]]
    prepare = transformers.AutoImageProcessor.from_pretrained(folder)
    report["pixels"] = prepare(images, return_tensors="pt")["pixel_values"]
with torch.no_grad():
    report["outputs"] = dict(model(**given["inputs"]))
torch.save(report, f"{work}/report.pt")
