"""Fill the masks of sentences as a user of a Hub folder would, with only torch and transformers.
python fill_masks.py HUB_FOLDER "The [MASK] of the list is returned." ...
"""

import sys

import torch
from transformers import AutoModelForMaskedLM, AutoTokenizer

folder, *sentences = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
model = AutoModelForMaskedLM.from_pretrained(folder, trust_remote_code=True).eval()

for sentence in sentences:
    batch = tokenizer(sentence, return_tensors="pt")
    with torch.no_grad():
        logits = model(**batch).logits[0]
    probabilities = logits[batch["input_ids"][0] == tokenizer.mask_token_id][0].softmax(-1)
    top = probabilities.topk(5)
    guesses = (f"{tokenizer.decode([token])} {p:.0%}" for p, token in zip(top.values.tolist(), top.indices.tolist()))
    print(f"  {sentence}\n      {'   '.join(guesses)}")
