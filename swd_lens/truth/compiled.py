"""A transformer whose weights are written, not trained: its programs, units and circuits are known.

Sixteen words with two of eight features each; a feature has four words, and two words share one feature at most. Two layers of
attention, four heads each, no norms, no MLP. Each program answers in words of its own, so that all of them stand in one host and
none disturbs another: the units of the others are what a circuit must not have.

1. previous (layer 0, head 0) attends one position back; its eight units each read the four words of one feature off the head
   and write that feature's four words to the channels of the previous word, which are also read out as its answers.
2. fraction (layer 0, head 1) attends everywhere alike; one unit reads the half of the words that count, one the other half.
3. reverse (layer 0, head 2) attends as far before the middle as the position stands behind it; eight units.
4. induction (layer 1, head 0) asks where the previous word was today's word and copies what stood there; eight units. Its
   circuit has those of `previous`, too.

The units are those of attn_o, W = A B per head with overlapping supports; their values are drawn (.85 to 1.15). A rotation turns
the residual stream by a known orthogonal matrix: every weight that reads or writes it is turned with it, the function is the
same, and no channel is privileged any more.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from swd_lens.base.checks import bounded
from swd_lens.base.surroundings import with_torch_defaults
from swd_lens.hosts.families import require_hooked_transformer
from swd_lens.tasks.task import Task
from swd_lens.truth.planted import rotation_of
from swd_lens.truth.scores import TrueUnits

WORDS, FEATURES = 16, 8
CONTEXT = 12
MIDDLE = CONTEXT // 2
SITES = ("blocks.0.attn_o", "blocks.1.attn_o")
PROGRAMS = ("previous", "fraction", "reverse", "induction")

# Tokens: BOS, the words, then the answers of each program.
_BOS = 0
_ANSWERS = {"previous": 1 + WORDS, "reverse": 1 + 2 * WORDS, "induction": 1 + 3 * WORDS, "fraction": 1 + 4 * WORDS}
_D_VOCAB = 1 + 4 * WORDS + 2
# Channels of the residual stream: today's word, the position, and what each program writes.
_CHANNELS = {"word": 0, "position": WORDS, "previous": WORDS + CONTEXT, "reverse": 2 * WORDS + CONTEXT}
_CHANNELS |= {"induction": 3 * WORDS + CONTEXT, "fraction": 4 * WORDS + CONTEXT}
_D_MODEL = 4 * WORDS + CONTEXT + 2
# Of queries times keys: a match is so far above the rest that attention is one, up to e^-SHARP.
_SHARP = 60.0


@dataclass(frozen=True)
class Compiled:
    """A compiled host with its answers.

    Attributes:
        model: a HookedTransformer. tasks: name -> its task.
        truths: site -> the units that its matrix was made of, as its rows are (head by head).
        circuits: task -> site -> numbers of the units that the program is.
        rotation: of the residual stream; None where its channels are the axes.
    """

    model: Any
    tasks: Mapping[str, Task]
    truths: Mapping[str, TrueUnits]
    circuits: Mapping[str, Mapping[str, tuple[int, ...]]]
    rotation: Float[Tensor, "d_model d_model"] | None


@with_torch_defaults
def compiled(*, rotated: bool = False, noise: float = 0.0, prompts: int = 60, seed: int = 0) -> Compiled:
    """Compile the four programs into a HookedTransformer, with the tasks that they do.

    Args:
        rotated: turn the residual stream by a random orthogonal matrix.
        noise: added to both attn_o matrices, as a share of their norms.
        prompts: of each task; a quarter each is validation and test.
        seed: of the units' values, the prompts, the noise and the rotation.

    Raises:
        ValueError: fewer than 12 prompts, or negative noise.

    Source: ours (evidence.md §5); the programs are those of Tracr's examples (Lindner et al., 2023), the compiler is not.
    """
    bounded("prompts", prompts, 12)
    bounded("noise", noise, 0, whole=False)
    g = torch.Generator().manual_seed(seed)
    truths, circuits = _units(g)
    model = _host()
    for layer, site in enumerate(SITES):
        weight = truths[site].read @ truths[site].write
        if noise:
            drawn = torch.randn(weight.shape, generator=g)
            weight = weight + drawn * (noise * weight.norm() / drawn.norm())
        model.blocks[layer].attn.W_O.data.copy_(weight.view_as(model.blocks[layer].attn.W_O))
    turn = rotation_of(_D_MODEL, seed) if rotated else None
    if turn is not None:
        # Every weight that reads or writes the residual stream in turned channels: x becomes x @ turn.
        for embedding, name in ((model.embed, "W_E"), (model.pos_embed, "W_pos")):
            getattr(embedding, name).data = getattr(embedding, name).data @ turn
        model.unembed.W_U.data = turn.T @ model.unembed.W_U.data
        for block in model.blocks:
            for name in ("W_Q", "W_K", "W_V"):
                getattr(block.attn, name).data = turn.T @ getattr(block.attn, name).data
            block.attn.W_O.data = block.attn.W_O.data @ turn
        truths = {site: TrueUnits(truth.read, truth.write @ turn) for site, truth in truths.items()}
    tasks = {name: _task(model, name, prompts, g) for name in PROGRAMS}
    return Compiled(model, tasks, truths, circuits, turn)


def _host() -> Any:
    """The transformer before its units. Words and positions are one-hot channels, and each answer reads its channel. Heads look
    where their program says, and carry the word that stands there. W_O is zero."""
    require_hooked_transformer(ImportError)
    from transformer_lens import HookedTransformer, HookedTransformerConfig

    cfg = HookedTransformerConfig(
        n_layers=2,
        d_model=_D_MODEL,
        n_heads=4,
        d_head=WORDS,
        n_ctx=CONTEXT,
        d_vocab=_D_VOCAB,
        attn_only=True,
        normalization_type=None,
        model_name="compiled",
        attn_scale=1.0,
        use_attn_scale=False,
        seed=0,
        device="cpu",
    )
    model = HookedTransformer(cfg)
    for parameter in model.parameters():
        parameter.data.zero_()
    # 1. Embeddings and answers.
    words, positions, halves = torch.arange(WORDS), torch.arange(CONTEXT), torch.arange(2)
    model.embed.W_E.data[1 + words, _CHANNELS["word"] + words] = 1.0
    model.pos_embed.W_pos.data[positions, _CHANNELS["position"] + positions] = 1.0
    for name in ("previous", "reverse", "induction"):
        model.unembed.W_U.data[_CHANNELS[name] + words, _ANSWERS[name] + words] = 1.0
    model.unembed.W_U.data[_CHANNELS["fraction"] + halves, _ANSWERS["fraction"] + halves] = 10.0
    # 2. Attention.
    first, second = (block.attn for block in model.blocks)
    place = _CHANNELS["position"]
    for attn, heads in ((first, (0, 1, 2)), (second, (0,))):
        for head in heads:
            attn.W_V.data[head, _CHANNELS["word"] + words, words] = 1.0
    for position in range(CONTEXT):  # a head's dimensions are positions here; WORDS >= CONTEXT
        first.W_Q.data[0, place + position, position] = _SHARP
        first.W_Q.data[2, place + position, position] = _SHARP
        if position + 1 < CONTEXT:
            first.W_K.data[0, place + position, position + 1] = 1.0
        if 0 < position <= MIDDLE:  # 2 MIDDLE - i for positions i from the middle on
            first.W_K.data[2, place + position, 2 * MIDDLE - position] = 1.0
    second.W_Q.data[0, _CHANNELS["word"] + words, words] = _SHARP
    second.W_K.data[0, _CHANNELS["previous"] + words, words] = 1.0
    return model.eval()


def _features(word: int) -> tuple[int, int]:
    """Words are the edges of a graph of features, each joined to the next and the next but one. It has odd cycles: the features
    of all words are linearly independent (rows and columns of a grid are not)."""
    first = word % FEATURES
    return first, (first + 1 + word // FEATURES) % FEATURES


def _counts(word: int) -> bool:
    """Whether `fraction` counts a word."""
    return word % 2 == 0


def _units(g: torch.Generator) -> tuple[dict[str, TrueUnits], dict[str, dict[str, tuple[int, ...]]]]:
    """The true units of both attn_o matrices, and which of them each program has."""
    copying = {SITES[0]: (("previous", 0), ("reverse", 2)), SITES[1]: (("induction", 0),)}
    truths: dict[str, TrueUnits] = {}
    of_program: dict[str, dict[str, tuple[int, ...]]] = {}
    for site, programs in copying.items():
        reads, writes = [], []
        for name, head in programs:
            of_program[name] = {site: tuple(range(len(reads), len(reads) + FEATURES))}
            for feature in range(FEATURES):
                words = [word for word in range(WORDS) if feature in _features(word)]
                reads.append(_vector(4 * WORDS, [head * WORDS + word for word in words], g))
                writes.append(_vector(_D_MODEL, [_CHANNELS[name] + word for word in words], g))
        if site == SITES[0]:
            of_program["fraction"] = {site: (len(reads), len(reads) + 1)}
            for half in range(2):
                reads.append(_vector(4 * WORDS, [WORDS + word for word in range(WORDS) if _counts(word) != half], g, 1.0))
                writes.append(_vector(_D_MODEL, [_CHANNELS["fraction"] + half], g, 1.0))
        truths[site] = TrueUnits(torch.stack(reads, 1), torch.stack(writes))
    of_program["induction"] |= of_program["previous"]
    return truths, of_program


def _vector(size: int, places: list[int], g: torch.Generator, value: float | None = None) -> Float[Tensor, " size"]:
    """Values between .85 and 1.15 at these places, or this value: a word's two features outweigh any one of another's."""
    vector = torch.zeros(size)
    vector[places] = 0.3 * torch.rand(len(places), generator=g) + 0.85 if value is None else value
    return vector


# ---------------------------------------------------------------------------------------------- tasks


def _task(model: Any, name: str, n: int, g: torch.Generator) -> Task:
    """Prompts of random words; the answer is a word of the program, the distractors all others of its words."""
    rows, answers = [], []
    seen: set[tuple[int, ...]] = set()
    while len(rows) < n:
        # All words differ, except where induction repeats one.
        length = int(torch.randint(MIDDLE + 1, CONTEXT, (1,), generator=g))
        words = torch.randperm(WORDS, generator=g)[:length].tolist()
        if name == "induction":
            words[-1] = words[int(torch.randint(0, length - 2, (1,), generator=g))]
        tie = name == "fraction" and 2 * sum(_counts(word) for word in words) == length
        if tie or tuple(words) in seen:
            continue
        seen.add(tuple(words))
        rows.append([_BOS, *(1 + word for word in words)])
        if name == "previous":
            answer = words[-2]
        elif name == "reverse":
            answer = words[2 * MIDDLE - length - 1]  # `length` is the position of the last word: BOS stands at 0
        elif name == "induction":
            answer = words[words.index(words[-1]) + 1]
        else:
            answer = int(2 * sum(_counts(word) for word in words) < length)
        answers.append(_ANSWERS[name] + answer)
    choices = range(_ANSWERS[name], _ANSWERS[name] + (2 if name == "fraction" else WORDS))
    distractors = [[token for token in choices if token != answer] for answer in answers]
    return Task.from_tokens(name, model, rows, answers, distractors)
