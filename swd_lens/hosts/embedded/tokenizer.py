"""The embedded model's tokenizer: whole words, split the way GPT-2 splits them.

1. A regular expression cuts text into pieces without losing a character: " Mary", " isn" + "'t", " 17" + "41",
   newline, four spaces of indentation, punctuation (with the space before it, if any).
2. The vocabulary is every piece of a large sample of the corpus, plus every entity with and without a leading space and
   00-99, 0-9 both ways. A piece is one token: decode(encode(text)) == text.
3. Special tokens: one each for beginning, end, padding and unknown words. The tokenizer adds BOS only if told to
   (TransformerLens' prepend_bos), never EOS.
"""

from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from swd_lens.hosts.embedded.corpus import sample_documents
from swd_lens.tasks.generators.words import ARGUMENTS, EVENTS, NAMES, OBJECTS, PLACES, ROLES

BOS, EOS, PAD, UNK = "<|bos|>", "<|eos|>", "<|pad|>", "<|unk|>"
# Contractions first (else the apostrophe is cut off alone), then indentation, newline, words, one or two digits,
# triple quotes and arrows as in GPT-2's merges, any other mark, a space that belongs to nothing.
PIECES = r"""'(?:s|t|re|ve|m|ll|d)\b| {4}|\n| ?[A-Za-z]+| ?[0-9]{1,2}| ?\"{3}| ?->| ?[^\sA-Za-z0-9]| """
# Documents of the sample that defines the vocabulary: every sentence of every template occurs hundreds of times.
VOCABULARY_DOCUMENTS = 20_000


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Build the tokenizer from the corpus; always the same one, as the sample has a fixed seed."""
    splitter = pre_tokenizers.Split(Regex(PIECES), behavior="isolated")
    words = set()
    for text in sample_documents(VOCABULARY_DOCUMENTS):
        words.update(piece for piece, _ in splitter.pre_tokenize_str(text))
    for word in (
        *NAMES,
        *ARGUMENTS,
        *OBJECTS,
        *PLACES,
        *EVENTS,
        *ROLES,
        *map(str, range(10)),
        *(f"{n:02d}" for n in range(100)),
    ):
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


def load_tokenizer(folder: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer saved in a folder, loaded in the way TransformerLens can reload it (it needs name_or_path)."""
    if not Path(folder, "tokenizer.json").is_file():
        raise FileNotFoundError(f"{folder} has no tokenizer.json; give a folder that embedded.train wrote")
    return AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
