"""compare: one prompt, several ways to edit for it, several requested shifts; what each moves and what it costs elsewhere.

1. The target is read once; every method makes one edit per requested shift from the same dense W (paper, app. component
   editing). "unit", "random" and "oracle" share one calibration, h* dW d = shift; "lora" is trained for the final margin.
2. Each is measured: the realised change of the final margin, KL behind the other prompts, KL on text if there is any.
3. Methods are compared at what they realised, never at what was asked for: `cost_at`, and the Pareto figure.
4. `lora_edits` trains dW = L_A L_B of rank 4. L_A = 0.01 N(0, 1), L_B = 0; one pair per requested shift, all from the same draw
   (seed 0). AdamW, 180 steps, learning rate 0.08, no weight decay. The paper names an L2 coefficient of 1e-4 and no loss; ours
   is (margin - margin_0 - shift)^2 + 1e-4 (||L_A||^2 + ||L_B||^2). All shifts are trained side by side, one per row of a batch:
   the rows' losses add up and their gradients do not mix. The host runs from the site's block on; its weights are left alone
   (a swap adds h L_A L_B to the dense output).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator
from torch import Tensor, nn
from transformer_lens.hook_points import HookPoint

from swd_lens.analysis.edit.edited import Delta, Edit
from swd_lens.analysis.edit.effects import measure
from swd_lens.analysis.edit.make import RANDOM_SEED, factor_set, oracle_edit, provenance, random_unit, unit_edit, unit_of
from swd_lens.analysis.edit.target import Target, find_target, require_number
from swd_lens.base import __version__
from swd_lens.base.display import card, folded_settings
from swd_lens.base.errors import EditError, quoted, visible_token
from swd_lens.base.figures import INK, literal, new_figure, style
from swd_lens.base.interrupts import Undo
from swd_lens.base.progress import tqdm
from swd_lens.base.surroundings import with_torch_defaults
from swd_lens.hosts import Start, host_of, require_gradients
from swd_lens.hosts.recording import standing_hooks
from swd_lens.hosts.sites import Site
from swd_lens.units.attach import require_free

METHODS = ("unit", "random", "oracle", "lora")
SHIFTS = (-2, -1, -0.5, 0, 0.5, 1, 2, 3)  # paper
RANK, STEPS, LEARNING_RATE, L2, INIT, SEED = 4, 180, 0.08, 1e-4, 0.01, 0  # of LoRA; paper, the seed is ours
_NAMES = {"oracle": "oracle (dense, rank one)", "lora": "LoRA, rank 4"}
_MARKERS = {"unit": "o", "random": "s", "oracle": "D", "lora": "^"}
# Column of the cost -> what it is on the axis.
_COSTS = {
    "KL other prompts": "mean KL of the next token on {n} other prompts (nats)",
    "largest KL": "largest KL of {n} prompts (nats)",
    "KL text": "mean KL per token of text (nats)",
}


@with_torch_defaults
@dataclass(frozen=True, repr=False)
class EditComparison:
    """Every edit of every method, with what it did.

    Attributes:
        rows: one row per method and requested shift; see `SideEffects.row`.
        edits: (method, requested shift) -> the edit.
        target: the prompt that is edited for.
        prompts: the other prompts.
        settings: every choice.
    """

    rows: pd.DataFrame
    edits: Mapping[tuple[str, float], Edit]
    target: Target
    prompts: tuple[str, ...]
    settings: Mapping[str, Any]

    def table(self) -> pd.DataFrame:
        """A copy of the rows: method, unit, requested shift, margins, KL on the other prompts and on text (nats)."""
        return self.rows.copy()

    def cost_at(self, change: float | int, of: str = "KL other prompts") -> pd.DataFrame:
        """Say what a realised margin change costs each method, cheapest first; NaN where no edit reached it.

        Between two edits the square root of KL is interpolated linearly: KL grows with the square of a small change.

        Args:
            change: of the final margin, logits; not 0.
            of: "KL other prompts", "largest KL" or "KL text".

        Raises:
            EditError: a change that is 0 or not finite, or no such column.
        """
        change = require_number("change", change)
        if change == 0 or of not in _COSTS:
            raise EditError(f"cost_at takes a change other than 0 and one of the three KL columns, got {change} and {quoted(of)}")
        costs = []
        for method, rows in self.rows.groupby("method", sort=False):
            # Between the edits of the change's sign and no edit at all.
            moved, paid = rows["margin change"].to_numpy(float), rows[of].to_numpy(float)
            branch = np.sign(moved) == np.sign(change)
            reached = np.concatenate([[0.0], np.abs(moved[branch])])
            roots = np.concatenate([[0.0], np.sqrt(paid[branch])])
            order = np.argsort(reached, kind="stable")
            root = np.interp(abs(change), reached[order], roots[order], right=np.nan)
            costs.append({"method": method, "unit": rows["unit"].iloc[0], of: float(root**2)})
        return pd.DataFrame(costs).sort_values(of, kind="stable", ignore_index=True)

    def plot(self, of: str = "KL other prompts"):
        """The Pareto figure (paper, fig. component-edit-pareto): realised margin change against mean KL, one line per method.

        Left and far from 0 is better. `of` is the column of the cost.

        Returns:
            A matplotlib Figure.
        """
        figure, axes = new_figure(1, 1, width=6.2, height=4.2)
        ax = axes[0, 0]
        ax.axhline(0.0, color=INK, linewidth=0.6)
        for index, (method, rows) in enumerate(self.rows.groupby("method", sort=False)):
            unit = rows["unit"].iloc[0]
            names = {"unit": f"unit {unit}", "random": f"random unit {unit}", **_NAMES}
            line = rows.sort_values("requested shift", kind="stable")
            ax.plot(
                line[of],
                line["margin change"],
                label=literal(names[str(method)]),
                marker=_MARKERS.get(str(method), "o"),
                markersize=4.5,
                linewidth=1.4,
                **style(index),
            )
            # The requested shift beside the outermost points; those in between follow by counting.
            color = style(index)["color"]
            shifts = line["requested shift"]
            for end in {shifts.idxmin(), shifts.idxmax()}:
                if shifts[end] == 0:
                    continue
                ax.annotate(
                    f"{shifts[end]:+g}",
                    (line[of][end], line["margin change"][end]),
                    xytext=(6, 0),
                    textcoords="offset points",
                    fontsize=7,
                    va="center",
                    color=color,
                )
        _kl_axis(ax, self.rows[of])
        ax.margins(y=0.12)
        answer, foil = visible_token(self.target.answer), visible_token(self.target.foil)
        ax.set(xlabel=_COSTS[of].format(n=len(self.prompts)), ylabel=literal(f"change of the margin {answer} − {foil} (logits)"))
        ax.set_title("numbers at the ends: requested shift (logits)", fontsize=8, color=INK, loc="right")
        figure.legend(loc="outside lower center", ncols=2, fontsize=8, frameon=False)
        return figure

    def __repr__(self) -> str:
        shown = self.table().to_string(index=False, float_format="{:.4g}".format)
        return f"EditComparison({self.target.prompt!r}: {self.target.answer!r} over {self.target.foil!r})\n{shown}"

    def _repr_html_(self) -> str:
        what = f"{self.target.prompt!r}: {self.target.answer!r} over {self.target.foil!r}, margin {self.target.margin:.3f}"
        return card(f"Edits of {self.target.site}", what, self.plot(), self.table(), folded_settings(self.settings))


@with_torch_defaults
def compare_edits(
    model: Any,
    factors: Any,
    unit: Any,
    prompt: Any,
    answer: str | int,
    foil: str | int,
    *,
    other_prompts: Sequence[Any],
    tokens: Any = None,
    shifts: Sequence[float | int] = SHIFTS,
    methods: Sequence[str] = METHODS,
    direction: str = "unembedding",
    prepend_bos: bool | None = None,
    random_seed: int = RANDOM_SEED,
    lora_seed: int = 0,
    lora_learning_rate: float | int = LEARNING_RATE,
    batch_size: int = 8,
    progress: bool = True,
) -> EditComparison:
    """Edit one prompt's margin in four ways, and measure what else moves; the defaults are the paper's.

    Args:
        model: the host, with nothing attached at the unit's site.
        factors, unit, prompt, answer, foil, direction, prepend_bos: see `edit_unit`.
        other_prompts: prompts that should not change; mean KL of their next token is the cost.
        tokens: text for a second cost, KL per next-token prediction; None = none.
        shifts: requested, in logits: h* dW d of unit, random and oracle, the final margin of lora.
        methods: any of METHODS.
        random_seed: draws the control unit (paper: 17); lora_seed draws L_A (ours: 0).
        lora_learning_rate: of AdamW (paper: 0.08).

    Raises:
        ValueError: (EditError) whatever `edit_unit` refuses, no other prompts, no or unknown methods, or bad shifts.
    """
    requested, methods = [require_number("a shift", shift) for shift in shifts], list(dict.fromkeys(methods))
    if not requested or len(set(requested)) != len(requested):
        raise EditError(f"shifts must be different numbers, at least one, got {tuple(shifts)}")
    if not methods or set(methods) - set(METHODS):
        raise EditError(f"methods must be some of {METHODS}, got {tuple(methods)}")
    if isinstance(other_prompts, str) or not len(other_prompts):
        raise EditError("other_prompts must be a list of at least one prompt: the cost is what happens to them")
    units = factor_set(factors)
    site, index = unit_of(host_of(model), units, unit)
    target = find_target(model, site, prompt, answer, foil, direction=direction, prepend_bos=prepend_bos)
    edits: list[Edit] = []
    for method in methods:
        if method == "lora":
            how = {"learning_rate": lora_learning_rate, "seed": lora_seed, "progress": progress}
            edits += lora_edits(model, site, target, requested, **how)
        elif method == "oracle":
            edits += [oracle_edit(model, site, target, shift) for shift in requested]
        else:
            of_unit = index if method == "unit" else random_unit(units[site.name], target, seed=random_seed, but=index)
            edits += [unit_edit(model, units, site, of_unit, target, shift, method=method) for shift in requested]
    effects = measure(model, edits, other_prompts, tokens, batch_size=batch_size, prepend_bos=prepend_bos, progress=progress)
    settings = {
        "unit": f"{site.name}/{index}",
        "methods": methods,
        "shifts": requested,
        "random_seed": random_seed,
        "lora_seed": lora_seed,
        "lora_learning_rate": float(lora_learning_rate),
        "n_prompts": len(other_prompts),
        "n_text_predictions": effects[0].n_predictions,
        "target": target.described(),
        "model": str(model.cfg.model_name),
        **standing_hooks(model),
        "weight_sha256": edits[0].settings["weight_sha256"],
        "swd_lens": __version__,
    }
    return EditComparison(
        rows=pd.DataFrame([effect.row() for effect in effects]),
        edits={(edit.method, edit.shift): edit for edit in edits},
        target=target,
        prompts=effects[0].prompts,
        settings=settings,
    )


def _kl_axis(ax: Any, values: Sequence[float] | pd.Series) -> None:
    """A log axis with 0 on it: ticks at 0 and at powers of ten."""
    positive = [float(value) for value in values if value > 0]
    if not positive:
        return
    low, high = math.floor(math.log10(min(positive))), math.ceil(math.log10(max(positive)))
    ax.set_xscale("symlog", linthresh=10.0**low, linscale=0.5)
    step = max(1, math.ceil((high - low) / 6))
    ticks = [10.0**power for power in range(high, low - 1, -step)]
    ax.xaxis.set_major_locator(FixedLocator([0.0, *reversed(ticks)]))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: "0" if value == 0 else f"$10^{{{round(math.log10(value))}}}$"))
    ax.set_xlim(-0.12 * 10.0**low, 10.0**high * 1.6)


# ---------------------------------------------------------------------------------------------- LoRA


class _Beside(nn.Module):
    """The dense product plus h L_A L_B, each row of the batch with its own pair."""

    def __init__(self, read: Float[Tensor, "batch d_in rank"], write: Float[Tensor, "batch rank d_out"]):
        super().__init__()
        self.read, self.write = read, write  # plain tensors: no parameters of the host

    def forward(self, h: Tensor, bias: Tensor | None, dense: Callable[[Tensor], Tensor]) -> Tensor:
        return dense(h) + torch.bmm(torch.bmm(h.float(), self.read), self.write).to(h.dtype)


def lora_edits(
    model: Any,
    site: Site,
    target: Target,
    shifts: Sequence[float],
    *,
    learning_rate: float | int = LEARNING_RATE,
    seed: int = SEED,
    progress: bool = True,
) -> list[Edit]:
    """One trained edit per requested shift of the final margin.

    Args:
        site: nothing may be attached there.
        shifts: in logits of the final margin.
        learning_rate: the paper's 0.08 is a large one; smaller ones leave more of the model as it was.

    Raises AttachError: units are attached at the site.
    """
    host = host_of(model)
    require_free(host, [site])
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    drawn = INIT * torch.randn(site.d_in, RANK, generator=generator, dtype=torch.float32)
    read = drawn.to(device).repeat(len(shifts), 1, 1).requires_grad_(True)
    write = torch.zeros(len(shifts), RANK, site.d_out, device=device, requires_grad=True, dtype=torch.float32)
    requested = torch.tensor(list(shifts), device=device, dtype=torch.float32)
    optimizer = torch.optim.AdamW([read, write], lr=float(learning_rate), weight_decay=0.0)
    require_gradients(model)
    # The host runs from the site's block on, the prompt once per row.
    tokens, ids = target.tokens[None], torch.tensor([target.answer_id, target.foil_id])
    with torch.no_grad():
        residual = host.residual(tokens, site.layer)
    start = Start(site.layer, residual.detach().repeat(len(shifts), 1, 1))
    tokens, mode = tokens.repeat(len(shifts), 1), host.model.training
    with torch.enable_grad(), Undo() as undo:
        host.swap(site, _Beside(read, write).train(mode), HookPoint().train(mode), undo.push)
        first = None
        for _ in tqdm(range(STEPS), desc="LoRA", unit="step", disable=not progress, leave=False):
            logits = host.last_logits(tokens, start=start, token_ids=ids).float()
            margin = logits[:, 0] - logits[:, 1]
            first = margin.detach() if first is None else first  # L_B = 0: the unedited margin, by the same arithmetic
            size = read.square().sum((1, 2)) + write.square().sum((1, 2))
            loss = ((margin - first - requested).square() + L2 * size).sum()
            read.grad, write.grad = torch.autograd.grad(loss, (read, write))
            optimizer.step()
    edits = []
    for shift, a, b in zip(shifts, read.detach().cpu(), write.detach().cpu(), strict=True):
        settings = provenance(host, site, target, "lora", float(shift)) | {
            "calibration": "trained: (margin - margin_0 - shift)^2 + l2 (||L_A||^2 + ||L_B||^2), final margin",
            "rank": RANK,
            "l2": L2,
            "init": INIT,
            "steps": STEPS,
            "learning_rate": float(learning_rate),
            "seed": seed,
        }
        delta = Delta(a.clone(), b.clone())
        edits.append(Edit(site.name, "lora", float(shift), delta, target, settings, host.model))
    return edits
