"""Choose the tokens that a masked language model predicts, and hide them."""

import numpy as np
from transformers import PreTrainedTokenizerBase

from src.errors import UserError

IGNORED = -100  # the label of a token that is not predicted


class Masking:
    """Hides tokens for masked language modelling (Devlin et al. 2018, section 3.1).

    Of the tokens that are not special, a fraction `mlm_probability` is predicted: 80% of those become [MASK], 10% a
    random token of the vocabulary, 10% stay unchanged. With `whole_words`, the tokens of a word are chosen together,
    each word with that probability, so that the expected number of tokens is the same.

    A sample's masks depend on (seed, epoch, index), not on the batch, worker or device. Without `every_epoch`
    (evaluation) they are the same in all epochs.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        mlm_probability: float,
        seed: int,
        every_epoch: bool = True,
        whole_words: bool = False,
    ):
        self.mlm_probability = mlm_probability
        self.seed = seed
        self.every_epoch = every_epoch
        self.mask_id = tokenizer.mask_token_id
        self.vocab_size = len(tokenizer)
        self.special = np.zeros(len(tokenizer), bool)
        self.special[tokenizer.all_special_ids] = True
        self.continues = continuation_tokens(tokenizer) if whole_words else None
        self.draw = np.random.Generator(np.random.Philox())

    def __call__(self, ids: np.ndarray, epoch: int, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Return a sample's tokens, some of them masked, and their labels, both (length,)."""
        self._seek(epoch if self.every_epoch else 0, index)
        chance, fate, other = self.draw.random((3, len(ids)))
        if self.continues is not None:
            chance = chance[self._word_starts(ids)]
        chosen = (chance < self.mlm_probability) & ~self.special[ids]
        masked = np.where(chosen & (fate < 0.8), self.mask_id, ids)
        masked = np.where(chosen & (fate >= 0.9), (other * self.vocab_size).astype(np.int64), masked)
        return masked, np.where(chosen, ids, IGNORED)

    def _seek(self, epoch: int, index: int) -> None:
        """Move the generator to a sample's random numbers, which Philox computes from a key and a counter."""
        state = self.draw.bit_generator.state
        state["state"]["key"][:] = self.seed, epoch
        state["state"]["counter"][:] = 0, 0, index, 0
        state["buffer_pos"] = len(state["buffer"])  # nothing is left over from the previous sample
        self.draw.bit_generator.state = state

    def _word_starts(self, ids: np.ndarray) -> np.ndarray:
        """Return the position of each token's word, (length,). No word extends across a special token."""
        starts = ~self.continues[ids] | self.special[ids]
        starts[1:] |= self.special[ids[:-1]]
        return np.maximum.accumulate(np.where(starts, np.arange(len(ids)), 0))


def continuation_tokens(tokenizer: PreTrainedTokenizerBase) -> np.ndarray:
    """Return which tokens continue a word, (vocabulary,) bool. Raises UserError unless the tokenizer is WordPiece."""
    model = getattr(getattr(tokenizer, "backend_tokenizer", None), "model", None)
    prefix = getattr(model, "continuing_subword_prefix", None)
    if type(model).__name__ != "WordPiece" or not prefix:
        found = f"{tokenizer.name_or_path} is not a WordPiece tokenizer, which marks the continuation of a word (##)"
        raise UserError(f"whole_word_masking: {found}; set it to false, or choose another tokenizer")
    continues = np.zeros(len(tokenizer), bool)
    for token, number in tokenizer.get_vocab().items():
        continues[number] = token.startswith(prefix)
    return continues
