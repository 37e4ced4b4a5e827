"""What a circuit's numbers are (../shared/spec/measure.md §1), in plain torch: nothing of swd_lens, nothing of transformer_lens.

1. Read what is given: token ids as plain lists (`Prompts`), factors out of the folder that swd_lens saved (`read_factors`).
2. Run a model, a function of (rows of ids, what stands in a projection's place) that gives last-position logits.
3. `attribute`: score_i = mean over prompts of max(0, sum over positions of z_i dg/dz_i), by autograd; mu_i = mean of z_i.
4. `measure`: mean margins Q of the dense model, with all units, and with each prefix of a ranking kept and ablated, and shares.
5. `cost_at`: the least cost among prefixes that recover .9 on validation prompts; None where the task is not carried.

Prompts are run one by one, whole, in float64; the circuits of one prompt are the rows of one batch.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional

# What stands in the place of projections: site -> function of what enters it, (batch, pos, d_in), that gives (batch, pos, d_out).
Projections = Mapping[str, Callable[[Tensor], Tensor]]
Model = Callable[[Tensor, Projections], Tensor]
Unit = tuple[str, int]


@dataclass(frozen=True)
class Prompts:
    """Prompts of one split as token ids; the last of each is the scoring position."""

    tokens: list[list[int]]
    answers: list[list[int]]
    distractors: list[list[int]]
    corrupt: list[list[int]]

    def margin(self, i: int, logits: Tensor) -> Tensor:
        """(batch,) of (batch, vocab): mean logit of the answers minus mean logit of the distractors."""
        return logits[:, self.answers[i]].mean(1) - logits[:, self.distractors[i]].mean(1)

    def prompt(self, i: int) -> Tensor:
        return torch.tensor([self.tokens[i]])


@dataclass(frozen=True)
class Pair:
    """Factors of one projection: y = (h @ read) @ write + bias."""

    read: Tensor
    write: Tensor
    bias: Tensor | float

    def edges(self) -> list[int]:
        """Active edges of each unit: nonzeros of both vectors; none where one of them is empty."""
        read, write = (self.read != 0).sum(0), (self.write != 0).sum(1)
        return torch.where((read > 0) & (write > 0), read + write, 0).tolist()


def read_factors(folder: Path, bias: Callable[[str], Tensor | float]) -> dict[str, Pair]:
    """The factors in a folder: factors.json names a file per site, which holds indices and values of the nonzeros.

    Args:
        bias: of the dense projection at a site.
    """
    pairs = {}
    for site, entry in json.loads((folder / "factors.json").read_text())["sites"].items():
        stored = load_file(folder / entry["file"])
        shapes = {"read": (entry["d_in"], entry["units"]), "write": (entry["units"], entry["d_out"])}
        dense = {}
        for part, shape in shapes.items():
            flat = torch.zeros(shape[0] * shape[1], dtype=torch.float64)
            flat[stored[f"{part}.index"].long()] = stored[f"{part}.value"].double()
            dense[part] = flat.view(shape)
        pairs[site] = Pair(dense["read"], dense["write"], bias(site))
    return pairs


def embedded(file: Path, eps: float = 1e-5) -> Model:
    """The embedded model from its file: pre-norm blocks, learned positions, gelu's tanh form, the embedding as unembedding.

    Sites: blocks.L.attn_o reads all heads' outputs side by side, blocks.L.mlp_out the activated neurons.
    """
    w = {name: value.double() for name, value in load_file(file).items()}
    n_layers = 1 + max(int(name.split(".")[1]) for name in w if name.startswith("blocks."))

    def norm(x: Tensor, name: str) -> Tensor:
        return functional.layer_norm(x, x.shape[-1:], w[f"{name}.w"], w[f"{name}.b"], eps)

    def attention(x: Tensor, at: str) -> Tensor:
        q, k, v = (torch.einsum("bpm,hmd->bhpd", x, w[f"{at}.W_{n}"]) + w[f"{at}.b_{n}"][:, None] for n in "QKV")
        pattern = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        heads = pattern.masked_fill(later, -torch.inf).softmax(-1) @ v
        return heads.transpose(1, 2).flatten(2)

    def forward(tokens: Tensor, instead: Projections) -> Tensor:
        def project(site: str, h: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
            return instead[site](h) if site in instead else h @ weight + bias

        x = w["embed.W_E"][tokens] + w["pos_embed.W_pos"][: tokens.shape[1]]
        for layer in range(n_layers):
            block = f"blocks.{layer}"
            heads = attention(norm(x, f"{block}.ln1"), f"{block}.attn")
            x = x + project(f"{block}.attn_o", heads, w[f"{block}.attn.W_O"].flatten(0, 1), w[f"{block}.attn.b_O"])
            before = norm(x, f"{block}.ln2") @ w[f"{block}.mlp.W_in"] + w[f"{block}.mlp.b_in"]
            neurons = functional.gelu(before, approximate="tanh")
            x = x + project(f"{block}.mlp_out", neurons, w[f"{block}.mlp.W_out"], w[f"{block}.mlp.b_out"])
        return norm(x[:, -1], "ln_final") @ w["embed.W_E"].T

    return forward


def llama(model: Any) -> Model:
    """transformers' LlamaForCausalLM; a forward hook on an nn.Linear gives what stands in its place."""

    def forward(tokens: Tensor, instead: Projections) -> Tensor:
        handles = []
        for site, function in instead.items():
            _, layer, kind = site.split(".")
            block = model.model.layers[int(layer)]
            linear = {"mlp_out": block.mlp.down_proj, "attn_o": block.self_attn.o_proj}[kind]
            handles.append(linear.register_forward_hook(lambda _, h, y, function=function: function(h[0])))
        try:
            return model(tokens, logits_to_keep=1, use_cache=False).logits[:, -1]
        finally:
            for handle in handles:
                handle.remove()

    return forward


def through_units(pairs: Mapping[str, Pair], seen: Callable[[str, Tensor], Tensor]) -> Projections:
    """Every site's projection through its units; `seen` gets (site, z) and gives what is written in z's place."""

    def of_site(site: str, pair: Pair) -> Callable[[Tensor], Tensor]:
        return lambda h: (seen(site, h.double() @ pair.read) @ pair.write + pair.bias).to(h.dtype)

    return {site: of_site(site, pair) for site, pair in pairs.items()}


def activations(model: Model, pairs: Mapping[str, Pair], tokens: Tensor) -> dict[str, Tensor]:
    """site -> (pos, unit) of one prompt, with all units."""
    z: dict[str, Tensor] = {}
    with torch.no_grad():
        model(tokens, through_units(pairs, lambda site, value: z.setdefault(site, value)))
    return {site: value[0] for site, value in z.items()}


@dataclass(frozen=True)
class Scores:
    """site -> (unit,): scores in logits of margin, and mean activations."""

    scores: dict[str, Tensor]
    means: dict[str, Tensor]


def attribute(model: Model, pairs: Mapping[str, Pair], train: Prompts, positions: str) -> Scores:
    """Step 3; at the last position ("scoring"), or at all of them: then the mean is over all tokens of all prompts."""
    chosen = slice(-1, None) if positions == "scoring" else slice(None)
    scores = {site: torch.zeros(pair.read.shape[1], dtype=torch.float64) for site, pair in pairs.items()}
    seen: dict[str, list[Tensor]] = {site: [] for site in pairs}
    for i in range(len(train.tokens)):
        z: dict[str, Tensor] = {}

        def keep(site: str, value: Tensor, z: dict[str, Tensor] = z) -> Tensor:
            z[site] = value if value.requires_grad else value.requires_grad_(True)
            return z[site]

        margin = train.margin(i, model(train.prompt(i), through_units(pairs, keep)))
        gradients = torch.autograd.grad(margin.sum(), [z[site] for site in pairs])
        for site, gradient in zip(pairs, gradients, strict=True):
            at = z[site].detach()[0, chosen]
            scores[site] += (at * gradient[0, chosen]).sum(0).clamp(min=0) / len(train.tokens)
            seen[site].append(at)
    return Scores(scores, {site: torch.cat(values).mean(0) for site, values in seen.items()})


def ranked(scores: Mapping[str, Tensor]) -> list[Unit]:
    """All units of all sites, the highest score first; equal ones in the order of sites and units."""
    units = [(float(score), site, unit) for site, of_site in scores.items() for unit, score in enumerate(of_site)]
    return [(site, unit) for _, site, unit in sorted(units, key=lambda each: -each[0])]


def prefix_grid(n_units: int) -> list[int]:
    """Lengths of prefixes: 0, 1, 2, 3, 4, 6, 8, 12, ... (2^a and 3 * 2^a), 640, and all units."""
    powers = [factor * 2**a for factor in (1, 3) for a in range(40)]
    return sorted({k for k in [0, *powers, 640] if k < n_units} | {n_units})


@dataclass(frozen=True)
class Measured:
    """Numbers of one split. Every row is of one prefix: units, edges, q keep, q ablate, recovered, sufficiency, drop."""

    q_dense: float
    q_full: float
    q_empty: float
    carried: float
    carried_se: float
    largest: float  # absolute margin of any prompt under anything: what rounding is measured by
    rows: list[dict[str, float]]

    @property
    def carries(self) -> bool:
        return self.carried > 2 * self.carried_se and self.carried > 0.05 * abs(self.q_dense)


def measure(
    model: Model,
    pairs: Mapping[str, Pair],
    prompts: Prompts,
    ranking: Sequence[Unit],
    means: Mapping[str, Tensor],
    lengths: Sequence[int],
    ablation: str,
    positions: str,
) -> Measured:
    """Step 4, of the prefixes of these lengths (0 first, the number of all units last)."""
    replaced = _replaced(pairs, ranking, lengths)
    dense, full, keep, ablate = [], [], [], []
    for i in range(len(prompts.tokens)):
        values = _values(model, pairs, prompts.corrupt[i] if prompts.corrupt else None, means, ablation, positions)
        with torch.no_grad():
            dense.append(prompts.margin(i, model(prompts.prompt(i), {}))[0])
            full.append(prompts.margin(i, model(prompts.prompt(i), through_units(pairs, lambda _, z: z)))[0])
            circuits = prompts.prompt(i).repeat(2 * len(lengths), 1)
            put = through_units(pairs, lambda site, z, v=values: _put(z, replaced[site], v[site], positions))
            margins = prompts.margin(i, model(circuits, put))
        keep.append(margins[: len(lengths)])
        ablate.append(margins[len(lengths) :])
    of_dense, of_full = torch.stack(dense), torch.stack(full)
    kept, ablated = torch.stack(keep, 1), torch.stack(ablate, 1)
    empty = kept[0]  # every unit is replaced
    q_full, q_empty, difference = float(of_full.mean()), float(empty.mean()), of_full - empty
    edges = {site: pair.edges() for site, pair in pairs.items()}
    rows = []
    for k, q_keep, q_ablate in zip(lengths, kept.mean(1).tolist(), ablated.mean(1).tolist(), strict=True):
        row = {"units": k, "edges": sum(edges[site][unit] for site, unit in ranking[:k])}
        row |= {"q keep": q_keep, "q ablate": q_ablate, "recovered": (q_keep - q_empty) / (q_full - q_empty)}
        row |= {"sufficiency": q_keep / q_full, "drop": q_full - q_ablate}
        row["recovered of dense"] = (q_keep - q_empty) / (float(of_dense.mean()) - q_empty)
        rows.append(row)
    return Measured(
        q_dense=float(of_dense.mean()),
        q_full=q_full,
        q_empty=q_empty,
        carried=q_full - q_empty,
        carried_se=float(difference.var(correction=1) / len(difference)) ** 0.5,
        largest=float(torch.cat([of_dense, of_full, kept.flatten(), ablated.flatten()]).abs().max()),
        rows=rows,
    )


def cost_at(validation: Measured, test: Measured, cost: str, recovered: float = 0.9) -> int | None:
    """Step 5."""
    reached = [row[cost] for row in validation.rows if row["recovered"] >= recovered]
    return int(min(reached)) if test.carries and reached else None


def _replaced(pairs: Mapping[str, Pair], ranking: Sequence[Unit], lengths: Sequence[int]) -> dict[str, Tensor]:
    """site -> (circuit, unit), True where a unit is replaced: outside each prefix (kept), then inside each (ablated)."""
    inside = {site: torch.zeros(len(lengths), pair.read.shape[1], dtype=torch.bool) for site, pair in pairs.items()}
    for row, k in enumerate(lengths):
        for site, unit in ranking[:k]:
            inside[site][row, unit] = True
    return {site: torch.cat([~mask, mask]) for site, mask in inside.items()}


def _values(
    model: Model, pairs: Mapping[str, Pair], corrupt: list[int] | None, means: Mapping[str, Tensor], ablation: str, positions: str
) -> dict[str, Tensor]:
    """site -> (pos or 1, unit): what a replaced unit is set to on one prompt."""
    if ablation == "zero":
        return {site: torch.zeros(1, pair.read.shape[1], dtype=torch.float64) for site, pair in pairs.items()}
    if ablation == "mean":
        return {site: means[site].double()[None] for site in pairs}
    assert ablation == "resample" and corrupt is not None
    z = activations(model, pairs, torch.tensor([corrupt]))
    return {site: value[-1:] if positions == "scoring" else value for site, value in z.items()}


def _put(z: Tensor, replaced: Tensor, value: Tensor, positions: str) -> Tensor:
    """z (circuit, pos, unit) with `value` in place of the replaced units, at the last position or at every one."""
    changed = torch.where(replaced[:, None, :], value, z)
    return changed if positions == "all" else torch.cat([z[:, :-1], changed[:, -1:]], 1)
