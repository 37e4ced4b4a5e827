"""lora: the trained control. dW = L_A L_B of rank 4, fitted to one prompt's final margin (paper, app. component editing).

1. L_A = 0.01 N(0, 1), L_B = 0; one pair per requested shift of the FINAL margin, all from the same draw (seed 0).
2. AdamW, 180 steps, learning rate 0.08, no weight decay. The paper names an L2 coefficient of 1e-4 and no loss; ours is
   (margin - margin_0 - shift)^2 + 1e-4 (||L_A||^2 + ||L_B||^2).
3. All shifts are trained side by side, one per row of a batch: the rows' losses add up and their gradients do not mix. The
   host runs from the site's block on; its weights are left alone (a swap adds h L_A L_B to the dense output).
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from tqdm.auto import tqdm
from transformer_lens.hook_points import HookPoint

from swd_lens.analysis.edit.edited import Edit
from swd_lens.analysis.edit.make import made_with
from swd_lens.analysis.edit.standing import Delta
from swd_lens.analysis.edit.target import Target
from swd_lens.base.machine import plain_float32
from swd_lens.hosts import Host, Start, Undo, host_of
from swd_lens.hosts.sites import Site
from swd_lens.units.attach import require_free

RANK, STEPS, LEARNING_RATE, L2, INIT, SEED = 4, 180, 0.08, 1e-4, 0.01, 0  # paper; the seed is ours


class _Beside(nn.Module):
    """The dense product plus h L_A L_B, each row of the batch with its own pair."""

    def __init__(self, read: Float[Tensor, "batch d_in rank"], write: Float[Tensor, "batch rank d_out"]):
        super().__init__()
        # Past nn.Module's registration: they are no parameters of the host.
        self.__dict__.update(read=read, write=write)

    def forward(self, h: Tensor, bias: Tensor | None, dense: Callable[[Tensor], Tensor]) -> Tensor:
        added = torch.bmm(torch.bmm(h.float(), self.__dict__["read"]), self.__dict__["write"])
        return dense(h) + added.to(h.dtype)


def lora_edits(
    model: Any,
    site: Site,
    target: Target,
    shifts: Sequence[float],
    *,
    rank: int = RANK,
    steps: int = STEPS,
    learning_rate: float | int = LEARNING_RATE,
    seed: int = SEED,
    progress: bool = True,
) -> list[Edit]:
    """One trained edit per requested shift of the final margin.

    Args:
        site: nothing may be attached there.
        shifts: in logits of the final margin.
        learning_rate: the paper's 0.08 is a large one; smaller ones leave more of the model as it was.

    Raises:
        AttachError: units are attached at the site.
    """
    host = host_of(model)
    require_free(host, [site])
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    start = INIT * torch.randn(site.d_in, rank, generator=generator)
    read = start.to(device).repeat(len(shifts), 1, 1).requires_grad_(True)
    write = torch.zeros(len(shifts), rank, site.d_out, device=device, requires_grad=True)
    wanted = torch.tensor(list(shifts), device=device)
    optimizer = torch.optim.AdamW([read, write], lr=float(learning_rate), weight_decay=0.0)
    with plain_float32(device), torch.enable_grad(), _Run(host, site, target, read, write) as margins:
        first = None
        for _ in tqdm(range(steps), desc="LoRA", unit="step", disable=not progress, leave=False):
            margin = margins()
            first = margin.detach() if first is None else first  # L_B = 0: the unedited margin, by the same arithmetic
            size = read.square().sum((1, 2)) + write.square().sum((1, 2))
            loss = ((margin - first - wanted).square() + L2 * size).sum()
            read.grad, write.grad = torch.autograd.grad(loss, (read, write))
            optimizer.step()
    about = {"steps": steps, "learning_rate": float(learning_rate), "seed": seed}
    pairs = zip(read.detach().cpu(), write.detach().cpu(), strict=True)
    return [
        _edit(host, site, target, float(shift), Delta(a.clone(), b.clone()), about)
        for shift, (a, b) in zip(shifts, pairs, strict=True)
    ]


class _Run:
    """While entered, calling it gives the margin of every row (float32), differentiable by the pairs."""

    def __init__(self, host: Host, site: Site, target: Target, read: Tensor, write: Tensor):
        self.host, self.site, self.target, self.pairs = host, site, target, (read, write)
        self.undo: list[Undo] = []

    def __enter__(self) -> Callable[[], Tensor]:
        try:
            return self._mount()
        except BaseException:
            self._take_out()
            raise

    def _mount(self) -> Callable[[], Tensor]:
        tokens, rows = self.target.tokens[None], self.pairs[0].shape[0]
        with torch.no_grad():
            residual = self.host.residual(tokens, self.site.layer)
        start = Start(self.site.layer, residual.detach().repeat(rows, 1, 1))
        tokens = tokens.repeat(rows, 1)
        ids = torch.tensor([self.target.answer_id, self.target.foil_id])
        mode, hook = self.host.model.training, HookPoint()
        self.host.swap(self.site, _Beside(*self.pairs).train(mode), hook.train(mode), self.undo.append)

        def margins() -> Tensor:
            logits = self.host.last_logits(tokens, start=start, token_ids=ids).float()
            return logits[:, 0] - logits[:, 1]

        return margins

    def __exit__(self, *_: Any) -> None:
        try:
            self._take_out()
        finally:  # a Ctrl-C may hit the first; what is undone is not undone again
            self._take_out()

    def _take_out(self) -> None:
        while self.undo:
            self.undo[-1]()
            self.undo.pop()


def _edit(host: Host, site: Site, target: Target, shift: float, delta: Delta, about: dict[str, Any]) -> Edit:
    settings = made_with(host, site, target, "lora", shift)
    settings |= {
        "calibration": "trained: (margin - margin_0 - shift)^2 + l2 (||L_A||^2 + ||L_B||^2), final margin",
        "rank": delta.rank,
        "l2": L2,
        "init": INIT,
        **about,
    }
    return Edit(site.name, "lora", shift, delta, target, settings, host.model)
