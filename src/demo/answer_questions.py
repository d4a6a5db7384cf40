"""Find texts that answer questions as a user of a Hub folder would, with only sentence-transformers.
python answer_questions.py HUB_FOLDER TEXTS.jsonl "How do I sort a list?" ...
"""

import json
import sys
import textwrap

from sentence_transformers import SentenceTransformer

folder, texts, *questions = sys.argv[1:]
model = SentenceTransformer(folder, trust_remote_code=True)
with open(texts, encoding="utf-8") as file:
    passages = [json.loads(line) for line in file]

documents = model.encode_document([passage["text"] for passage in passages], batch_size=256)
for question, scores in zip(questions, model.similarity(model.encode_query(questions), documents)):
    print(f"  {question}")
    best = scores.topk(3)
    for score, number in zip(best.values.tolist(), best.indices.tolist()):
        passage = f"{passages[number]['source']}: {passages[number]['text']}"
        print(f"      {score:.2f}  {textwrap.shorten(passage, 108, placeholder=' ...')}")
