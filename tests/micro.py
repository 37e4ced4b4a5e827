"""Models small enough to compute by hand, and one small enough to run every test on.

micro_model(): one layer, d_model 2, no LayerNorm, attention that writes nothing, ReLU.

    embedding      token 0 -> (1, 0)   token 1 -> (0, 1)   token 2 -> (1, 1)
    mlp_in         W = [[1, 2], [3, 4]], b = 0            mlp_out  W = [[1, 2], [3, 4]], b = 0
    unembedding    logit 0 = x0, logit 1 = x1, logit 2 = 0

The last token decides everything. For token 2: x = (1, 1), post = relu((4, 6)), mlp_out = (4*1 + 6*3, 4*2 + 6*4) = (22, 32),
residual = (23, 33), so the margin "token 1 over token 0" is 10.
"""

import torch
from transformer_lens import HookedTransformer, HookedTransformerConfig

from swd_lens.tasks.split import TaskExample
from swd_lens.tasks.task import TaskSplit
from swd_lens.units.factors import Factors

W = torch.tensor([[1.0, 2.0], [3.0, 4.0]])


def micro_model(*, gated_mlp: bool = False) -> HookedTransformer:
    """The model above; a gate's weights are zero."""
    sizes = {"n_layers": 1, "d_model": 2, "n_heads": 1, "d_head": 2, "d_mlp": 2, "n_ctx": 8, "d_vocab": 3, "seed": 0}
    cfg = HookedTransformerConfig(**sizes, act_fn="relu", gated_mlp=gated_mlp, normalization_type=None)
    model = HookedTransformer(cfg)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.embed.W_E.copy_(torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]]))
        model.blocks[0].mlp.W_in.copy_(W)
        model.blocks[0].mlp.W_out.copy_(W)
        model.unembed.W_U.copy_(torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]]))
    return model.eval()


def identity_factors() -> dict[str, Factors]:
    """A = I, B = W at mlp_out: z is the MLP's hidden activation, unit i reads 1 input and writes 2 outputs."""
    return {"blocks.0.mlp_out": Factors(torch.eye(2), W.clone(), weight=W.clone())}


def split_of(
    prompts: list[list[int]], answers: list[list[int]], distractors: list[list[int]], d_vocab: int, name: str = "train"
) -> TaskSplit:
    """A TaskSplit from token ids, past any tokenizer."""
    return TaskSplit(
        name,
        tuple(TaskExample(f"prompt {i}", ("right",), ("wrong",)) for i in range(len(prompts))),
        tuple(torch.tensor(prompt) for prompt in prompts),
        tuple(tuple(ids) for ids in answers),
        tuple(tuple(ids) for ids in distractors),
        d_vocab,
        task="by hand",
    )


def toy_model(**overrides) -> HookedTransformer:
    """Two layers, random weights of an order that makes every part matter, LayerNorm, learned positions."""
    settings = {
        "n_layers": 2, "d_model": 16, "n_heads": 2, "d_head": 8, "d_mlp": 32, "n_ctx": 32, "d_vocab": 20,
        "act_fn": "gelu_new", "normalization_type": "LN", "seed": 0,
    }  # fmt: skip
    model = HookedTransformer(HookedTransformerConfig(**{**settings, **overrides}))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model.eval()


def random_tokens(rows: int, pos: int, d_vocab: int = 20, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, d_vocab, (rows, pos), generator=torch.Generator().manual_seed(seed))


def random_split(n: int = 24, d_vocab: int = 20, seed: int = 0, name: str = "train", length: int | None = None) -> TaskSplit:
    """Prompts of 1 to 8 random tokens, one answer, two distractors. Of one `length` where lengths are no matter: each is run by
    itself."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 9, (n,), generator=generator).tolist() if length is None else [length] * n
    prompts = [torch.randint(0, d_vocab, (length,), generator=generator).tolist() for length in lengths]
    wrong = [[(i + 1) % d_vocab, (i + 2) % d_vocab] for i in range(n)]
    return split_of(prompts, [[i % d_vocab] for i in range(n)], wrong, d_vocab, name)
