"""Text for training the embedded model: batches with targets and weights, and the vocabulary of its tokenizer.

1. `TrainingPacker.batch`: rows with targets, document numbers (for the attention mask) and loss weights, all from
   (seed, step) alone: a run can be resumed at any step, and no row comes twice.
2. `build_tokenizer`: a regular expression cuts text into pieces without losing a character: " Mary", " isn" + "'t",
   " 17" + "41", newline, four spaces of indentation, punctuation (with the space before it, if any). The vocabulary is every
   piece of a fixed sample of the corpus (`sample_documents`), plus every entity with and without a leading space and 00-99,
   0-9 both ways. A piece is one token: decode(encode(text)) == text. There is one special token each for beginning, end,
   padding and unknown words.

Seven rows of eight are attended to with a document mask, as every document deserves a clean context; in the eighth
attention crosses documents, so that packed text under an ordinary causal forward (that is how `text_tokens` rows are
used, and how everything in swd_lens runs the model) is something the model has been trained on.
"""

import random
from collections.abc import Iterator
from itertools import chain
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import WordLevel
from torch import Tensor
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from swd_lens.hosts.embedded.corpus import BOS, EOS, KINDS, N_CTX, UNK, Packer, document
from swd_lens.tasks.generators import FAMILIES, generate
from swd_lens.tasks.generators.words import ARGUMENTS, EVENTS, NAMES, OBJECTS, PLACES, ROLES, SPLITS

# Copying comes first (no task is learned before it).
COPY_TOKENS = 900_000
EARLY_MIX = {"ioi": 0.14, "docstring": 0.10, "greater_than": 0.16, "gendered_pronoun": 0.04, "copy": 0.43, "filler": 0.13}
BOS_DROPPED = 0.15  # so that prompts without BOS work as well
CROSSING_ROWS = 1 / 8  # rows without document mask
HEAVY = 3.0  # loss weight of the tokens that the tasks are about; they are few among the words of the templates

PAD = "<|pad|>"
# Contractions first (else the apostrophe is cut off alone), then indentation, newline, words, one or two digits,
# triple quotes and arrows as in GPT-2's merges, any other mark, a space that belongs to nothing.
PIECES = r"""'(?:s|t|re|ve|m|ll|d)\b| {4}|\n| ?[A-Za-z]+| ?[0-9]{1,2}| ?\"{3}| ?->| ?[^\sA-Za-z0-9]| """
# Documents of the sample that defines the vocabulary: every sentence of every template occurs hundreds of times.
VOCABULARY_DOCUMENTS = 20_000


class Batch(NamedTuple):
    """One training step's input."""

    tokens: Int[Tensor, "batch pos"]
    targets: Int[Tensor, "batch pos"]
    documents: Int[Tensor, "batch pos"]  # number of the document of each token; attention stays within equal numbers
    heavy: Bool[Tensor, "batch pos"]  # targets that count HEAVY times


class TrainingPacker(Packer):
    """A packer that makes batches for training, too; see `Packer`."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, split: str = "train"):
        super().__init__(tokenizer, split)
        vocabulary = tokenizer.get_vocab()
        self.pronouns = frozenset((vocabulary[" he"], vocabulary[" she"]))
        self.digits = frozenset(i for word, i in vocabulary.items() if len(word) == 2 and word.isdigit())
        self.entities = frozenset(vocabulary[" " + word] for word in (*NAMES, *ARGUMENTS))

    def heavy(self, ids: list[int]) -> list[bool]:
        """Which tokens of one document weigh more.

        He and she; names and arguments that the document has already mentioned; two digits after a century that it has
        already mentioned (the end year; nothing predicts the digits of the first year).
        """
        seen: set[int] = set()
        flags = []
        repeated = False  # whether the token before this one occurs earlier
        for i in ids:
            end_year = i in self.digits and repeated
            flags.append(end_year or i in self.pronouns or (i in self.entities and i in seen))
            repeated = i in seen
            seen.add(i)
        return flags

    def batch(self, seed: int, step: int, rows: int, mix: dict[str, float]) -> Batch:
        """The batch of one training step; `rows` rows of N_CTX tokens, every row from its own seed."""
        lines = []
        for row in range(rows):
            rng = random.Random(f"{self.split}/{seed}/{step}/{row}")
            documents = self.row(rng, mix, N_CTX + 1, BOS_DROPPED)
            ids = list(chain(*documents))
            heavy = list(chain(*map(self.heavy, documents)))
            crossing = rng.random() < CROSSING_ROWS
            numbers = [0 if crossing else n for n, ids_n in enumerate(documents) for _ in ids_n]
            lines.append((ids[:-1], ids[1:], numbers[:-1], heavy[1:]))
        return Batch(*(torch.tensor(column) for column in zip(*lines, strict=True)))


def loss_weights(heavy: Bool[Tensor, "batch pos"], factor: float | int) -> Float[Tensor, "batch pos"]:
    """Loss weights with mean 1: `factor` on heavy targets, 1 elsewhere, rescaled."""
    weights = 1.0 + (factor - 1.0) * heavy.float()
    return weights / weights.mean()


def sample_documents(n: int, seed: int = 0) -> Iterator[str]:
    """`n` documents of all kinds and splits and a prompt on an unseen template for every fourth: all words there are.

    Unseen templates only give words to the vocabulary here; the training text never contains one.
    """
    rng = random.Random(f"vocabulary/{seed}")
    uniform = {kind: 1.0 for kind in KINDS}
    for _ in range(n):
        yield document(rng, uniform, rng.choice(SPLITS))
    for family in FAMILIES:
        yield from (example.prompt for example in generate(family, "train", n // 16, seed, templates="unseen"))


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Build the tokenizer from the corpus; always the same one, as the sample has a fixed seed."""
    splitter = pre_tokenizers.Split(Regex(PIECES), behavior="isolated")
    words = set()
    for text in sample_documents(VOCABULARY_DOCUMENTS):
        words.update(piece for piece, _ in splitter.pre_tokenize_str(text))
    digits = (*map(str, range(10)), *(f"{n:02d}" for n in range(100)))
    for word in (*NAMES, *ARGUMENTS, *OBJECTS, *PLACES, *EVENTS, *ROLES, *digits):
        words.update((word, " " + word))
    vocabulary = {word: i for i, word in enumerate([BOS, EOS, PAD, UNK, *sorted(words)])}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token=UNK))
    tokenizer.pre_tokenizer = splitter
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        unk_token=UNK,
        clean_up_tokenization_spaces=False,  # clean-up would rewrite " ," and " '": not lossless
        model_input_names=["input_ids", "attention_mask"],
    )
