"""Texts → vectors of unit length, by a model of this project or by any that sentence-transformers loads."""

import contextlib
import itertools
import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from src.checkpoints.reading import Checkpoint, load_all, read_pretrained
from src.cli import progress
from src.data.readers import grouped
from src.embed.passages import (
    Span,
    characters,
    cut_around,
    passage_edges,
    prompt_tokens,
    shifted,
    special_tokens,
    tokens_of,
    unit_starts,
)
from src.errors import RunFailed, UserError, first_line
from src.files import looks_like_path
from src.lion import LionConfig, LionEmbeddingModel, LionVisionConfig
from src.lion.cpu import speed_up
from src.lion.mixers import MIXERS
from src.lion.pooling import pool_spans

QUERY, DOCUMENT = "query", "document"


@dataclass
class Passages:
    """That texts are read in passages: of at most `size` tokens, and of a `unit` of passages.UNITS."""

    size: int
    unit: str = "tokens"


@dataclass
class Encoded:
    """Unit vectors, (vectors, D) in float32; `owners`, (vectors,), the text of each in ascending order, if texts have
    several; how many tokens were read, and texts cut; and the `places` of each vector, (vectors, 4): its first token
    and the one after its last, and the same in characters of the text, −1 if unknown."""

    vectors: Tensor
    owners: Tensor | None
    tokens: int
    cut: int
    places: Tensor


@dataclass
class Settings:
    """How texts are read. `limit` is in tokens; None: the model's own. Prompts stand before texts of a kind; one that
    is not given is the model's own."""

    limit: int | None = None
    prompts: dict[str, str] = field(default_factory=dict)
    device: str = "cpu"
    bfloat16: bool = False
    batch_tokens: int = 16384  # of a batch, padding included, unless a single text is longer
    segment_length: int | None = None  # tokens of the segments in which longer texts are read; None: the model's own
    trust_remote_code: bool = False
    dims: int | None = None  # numbers of a vector that are kept; None: all

    def autocast(self) -> contextlib.AbstractContextManager:
        return torch.autocast(self.device, torch.bfloat16, enabled=self.bfloat16)


class Encoder(ABC):
    name: str
    settings: Settings
    title: str  # in words
    limit: int | None  # tokens of a text; longer ones are cut
    prompts: dict[str, str]

    @abstractmethod
    def encode(self, texts: Sequence[str], kind: str, title: str = "", passages: Passages | None = None) -> Encoded:
        """Encode texts of a kind, QUERY or DOCUMENT; with `passages`, each of their passages. With a `title` there is a
        progress bar. Raises RunFailed for vectors that are not finite, UserError for a model without passages."""

    def encode_passages(self, texts: Sequence[str], passages: Sequence[Span | None], title: str = "") -> Encoded:
        """Encode a passage of each text, given in characters, or the whole text for None. Unless a subclass can do
        better, a passage is read alone."""
        return self.encode([text[slice(*(span or (None,)))] for text, span in zip(texts, passages)], DOCUMENT, title)

    def check_dims(self, size: int) -> None:
        """Raise UserError unless vectors of this size have the numbers that are to be kept."""
        if (dims := self.settings.dims or size) > size:
            raise UserError(f"--dims={dims}: the vectors of {self.name} have {size} numbers; lower it")

    def normalized(self, vectors: Tensor) -> Tensor:
        """Truncate vectors, if asked to, and make them of unit length, in place. Raises RunFailed unless they are
        finite."""
        self.check_dims(vectors.shape[1])
        vectors = vectors[:, : self.settings.dims].contiguous()
        if not vectors.isfinite().all():
            raise RunFailed(f"{self.name}: non-finite vectors; use --precision fp32, or another checkpoint")
        return F.normalize(vectors, dim=-1, out=vectors)


def open_encoder(name: str, settings: Settings) -> Encoder:
    """Open a checkpoint, a Hub folder, or what `SentenceTransformer(name)` loads. Raises UserError."""
    return LionEncoder(name, settings) if _is_ours(name) else OtherEncoder(name, settings)


def _is_ours(name: str) -> bool:
    path = Path(name)
    if not path.is_dir():
        if path.exists() or looks_like_path(name):
            return True
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

        try:
            path = Path(hf_hub_download(name, "config.json")).parent
        except Exception as error:  # which loading the model then reports
            local = isinstance(error, LocalEntryNotFoundError)
            # Models of sentence-transformers may have no owner, or no configuration of transformers.
            return "/" in name and (local or not isinstance(error, EntryNotFoundError))
    ours = (LionConfig.model_type, LionVisionConfig.model_type)  # an image model is ours to refuse
    try:
        return json.loads((path / "config.json").read_text()).get("model_type") in ours
    except (OSError, ValueError, AttributeError):
        return not (path / "modules.json").is_file()


class LionEncoder(Encoder):
    """A model of this project; one that was not trained for embeddings takes the mean of a text's tokens."""

    def __init__(self, name: str, settings: Settings):
        read = read_pretrained(name, "MODEL")
        tokenizer = read.load_tokenizer()
        if tokenizer is None:
            raise UserError(f"{name} has no tokenizer; give its Hub folder, or a checkpoint of main.py or embed.py")
        self.name, self.settings, self.tokenizer = name, settings, tokenizer
        self.model = embedding_model(read).to(settings.device)
        self.model.config.segment_length = settings.segment_length or self.model.config.segment_length
        speed_up(self.model)
        config = self.model.config
        self.check_dims(config.hidden_size)
        self.limit = settings.limit
        if config.has_positions:
            table = config.max_position_embeddings
            if (settings.limit or 0) > table:
                raise UserError(f"--max_seq_len={settings.limit}: {name} has {table} position embeddings; lower it")
            self.limit = self.limit or table
        self.prompts = {**read.embedding.get("prompts", {}), **settings.prompts}
        self.title = f"{config.mixer}, {config.pooling} pooling"
        if not tokenizer.is_fast:
            raise UserError(f"{name}: its tokenizer has no fast version (tokenizer.json); export it with one")
        self.special = special_tokens(tokenizer)

    def encode(self, texts: Sequence[str], kind: str, title: str = "", passages: Passages | None = None) -> Encoded:
        if passages is not None:
            self.check_passages()
        vectors, counts, tokens, cut = [], [], 0, 0
        places: list[Tensor] = []
        prompt = self.prompts.get(kind, "")
        options = {"return_attention_mask": False, "return_token_type_ids": False, "return_offsets_mapping": True}
        options |= {"truncation": True, "max_length": self.limit} if self.limit else {}
        with bar_of(title, len(texts)) as bar:
            for group in grouped(texts, len):
                group = [prompt + text for text in group]
                encoded = self.tokenizer(group, **options)
                rows = encoded["input_ids"]
                spans, of_group, before = [], [], len(prompt)
                for text, row, offsets in zip(group, rows, encoded["offset_mapping"]):
                    spans.append(self.spans(text, len(row), offsets, passages))
                    chars = (characters(span, offsets, self.special) for span in spans[-1])
                    of_group += [(*span, *(max(0, c - before) for c in each)) for span, each in zip(spans[-1], chars)]
                places.append(torch.tensor(of_group))
                of_text: list[Tensor] = [torch.empty(0)] * len(rows)
                for batch in batches([len(row) for row in rows], self.settings.batch_tokens):
                    found = self._vectors([rows[n] for n in batch], [spans[n] for n in batch])
                    for number, one in zip(batch, found):
                        of_text[number] = one
                    bar.update(len(batch))
                vectors.append(torch.cat(of_text))
                counts += map(len, spans)
                tokens += sum(map(len, rows))
                cut += sum(bool(one.overflowing) for one in encoded.encodings) if self.limit else 0
        owners = None if passages is None else torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
        return Encoded(self.normalized(torch.cat(vectors)), owners, tokens, cut, torch.cat(places))

    def encode_passages(self, texts: Sequence[str], passages: Sequence[Span | None], title: str = "") -> Encoded:
        """Encode a passage of each text, after the whole text has been read, once for all its passages; or, if it is
        too long for the model, as much of it as is around the passage."""
        self.check_passages()
        numbers: dict[str, list[int]] = {}
        for number, text in enumerate(texts):
            numbers.setdefault(text, []).append(number)
        vectors = torch.empty(len(texts), self.model.config.hidden_size)
        places = torch.empty(len(texts), 4, dtype=torch.long)
        tokens, cut, prompt = 0, 0, self.prompts.get(DOCUMENT, "")
        options = {"return_attention_mask": False, "return_token_type_ids": False, "return_offsets_mapping": True}
        with bar_of(title, len(texts)) as bar:
            for group in grouped(numbers.items(), lambda item: len(item[0])):
                encoded = self.tokenizer([prompt + text for text, _ in group], **options)
                rows, spans, owners = [], [], []
                for (_, own), ids, offsets in zip(group, encoded["input_ids"], encoded["offset_mapping"]):
                    moved = [shifted(passages[number], len(prompt)) for number in own]
                    found = [tokens_of(span, offsets, self.special) if span else (0, len(ids)) for span in moved]
                    if self.limit is None or len(ids) <= self.limit:
                        rows.append(ids)
                        spans.append(found)
                        owners.append(own)
                    else:
                        head = prompt_tokens(prompt, offsets, self.special)
                        windows = [cut_around(ids, span, self.limit, self.special, head) for span in found]
                        rows += [kept for kept, _ in windows]
                        spans += [[span] for _, span in windows]
                        owners += [[number] for number in own]
                        cut += len(own)
                for batch in batches([len(row) for row in rows], self.settings.batch_tokens):
                    found = self._vectors([rows[n] for n in batch], [spans[n] for n in batch])
                    for number, one in zip(batch, found):
                        vectors[owners[number]] = one
                        places[owners[number], :2] = torch.tensor(spans[number])
                        bar.update(len(one))
                tokens += sum(map(len, rows))
        places[:, 2:] = torch.tensor([span or (0, len(text)) for text, span in zip(texts, passages)])
        return Encoded(self.normalized(vectors), None, tokens, cut, places)

    def check_passages(self) -> None:
        """Raise UserError unless passages have vectors."""
        if self.model.config.pooling == "cls":
            problem = "pools only the first token (pooling=cls) and cannot embed passages"
            raise UserError(f"{self.name} {problem}; use a model with mean or attention pooling")

    def spans(self, text: str, length: int, offsets: list[Span], passages: Passages | None) -> list[Span]:
        """Return the passages of a text, in tokens; without `passages`, the whole."""
        if passages is None:
            return [(0, length)]
        breaks = unit_starts(text, offsets, self.special, passages.unit)
        return list(itertools.pairwise(passage_edges(length, self.special, passages.size, breaks)))

    @torch.inference_mode()
    def _vectors(self, rows: list[list[int]], spans: list[list[Span]]) -> list[Tensor]:
        """Return the vectors of each text's spans, (spans, D)."""
        model, device = self.model, self.settings.device
        ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True)
        lengths = torch.tensor([len(row) for row in rows])
        mask = (torch.arange(ids.shape[1]) < lengths[:, None]).to(device) if len(rows) > 1 else None
        whole = all(each == [(0, len(row))] for row, each in zip(rows, spans))
        with self.settings.autocast():
            segments = MIXERS[model.config.mixer].has_states and ids.shape[1] > model.config.segment_length
            if not whole and len(rows) == 1 and segments:
                return [model.encode_long(ids, spans=spans[0], segment_length=model.config.segment_length)[0]]
            if whole:
                return list(model(ids.to(device), mask).pooler_output.float().cpu().split(1))
            x = model.lion(ids.to(device), mask).last_hidden_state
            scores = model.scores(x)
        return [
            pool_spans(x[n, : len(row)], spans[n], None if scores is None else scores[n, : len(row)])[0].float()
            for n, row in enumerate(rows)
        ]


def embedding_model(read: Checkpoint, stored: LionConfig | None = None) -> LionEmbeddingModel:
    """Return a checkpoint's encoder with the pooling of its configuration. stored: the configuration of its weights, if
    it was changed. Raises UserError."""
    model = LionEmbeddingModel(read.config)
    weights = {f"lion.{name}": x for name, x in read.encoder().items() if not name.startswith("pooler.")}
    if model.pooling_weight is not None:
        weights["pooling_weight"] = read.weights.get("pooling_weight", model.pooling_weight.detach())
    load_all(model, weights, str(read.path), stored)
    return model.eval()


def bar_of(title: str, total: int) -> Any:
    """A progress bar, silent without a title."""
    return progress(total=total, desc=title, unit="text") if title else tqdm(disable=True)


def batches(lengths: Sequence[int], batch_tokens: int) -> Iterator[list[int]]:
    """Yield the numbers of texts of similar length, at most `batch_tokens` with padding, the longest first."""
    batch: list[int] = []
    for number in sorted(range(len(lengths)), key=lambda number: -lengths[number]):
        if batch and lengths[batch[0]] * (len(batch) + 1) > batch_tokens:
            yield batch
            batch = []
        batch.append(number)
    if batch:
        yield batch


class OtherEncoder(Encoder):
    """A model that sentence-transformers loads, with its own limit and prompts."""

    def __init__(self, name: str, settings: Settings):
        from sentence_transformers import SentenceTransformer

        self.name, self.settings = name, settings
        try:
            self.model: Any = SentenceTransformer(
                name, device=settings.device, trust_remote_code=settings.trust_remote_code
            )
        except Exception as error:  # whatever the libraries and the model's own code raise
            hint = "check its name" if settings.trust_remote_code else "if it has code of its own, --trust_remote_code"
            raise UserError(f"{name}: sentence-transformers cannot load it ({first_line(error)}); {hint}") from None
        if (size := self.model.get_sentence_embedding_dimension()) is not None:
            self.check_dims(size)
        if settings.limit is not None:
            table = getattr(getattr(self.model[0], "auto_model", None), "config", None)
            if settings.limit > (longest := getattr(table, "max_position_embeddings", None) or settings.limit):
                raise UserError(f"--max_seq_len={settings.limit}: {name} reads at most {longest} tokens; lower it")
            self.model.max_seq_length = settings.limit
        self.limit = self.model.max_seq_length
        self.prompts = {kind: text for kind, text in self.model.prompts.items() if text} | settings.prompts
        self.title = "sentence-transformers"

    def encode(self, texts: Sequence[str], kind: str, title: str = "", passages: Passages | None = None) -> Encoded:
        if passages is not None:
            raise UserError(f"{self.name} gives one vector per text; omit --passages, or split the documents first")
        encode = self.model.encode_query if kind == QUERY else self.model.encode_document
        own = {"prompt": self.settings.prompts[kind]} if kind in self.settings.prompts else {}
        size = max(1, min(32, self.settings.batch_tokens // (self.limit or 512)))
        vectors, tokens, cut, places = [], 0, 0, []
        with bar_of(title, len(texts)) as bar:
            for group in grouped(texts, len):
                with self.settings.autocast():
                    found = encode(group, batch_size=size, show_progress_bar=False, convert_to_tensor=True, **own)
                vectors.append(found.float().cpu())
                lengths = self._lengths([self.prompts.get(kind, "") + text for text in group])
                longest = self.limit or max(lengths, default=0)
                cut += sum(length > longest for length in lengths)
                tokens += sum(min(length, longest) for length in lengths)
                places += [(0, min(length, longest), -1, -1) for length in lengths or [-1] * len(group)]
                bar.update(len(group))
        return Encoded(self.normalized(torch.cat(vectors)), None, tokens, cut, torch.tensor(places))

    def _lengths(self, texts: list[str]) -> list[int]:
        """Tokens of texts; none from a model without a tokenizer of transformers."""
        tokenizer = self.model.tokenizer
        if not isinstance(tokenizer, PreTrainedTokenizerBase):
            return []
        return [len(row) for row in tokenizer(texts, return_attention_mask=False)["input_ids"]]
