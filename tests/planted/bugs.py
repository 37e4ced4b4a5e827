"""Forty bugs of one line, spread over the rooms: wrong signs, off by one, swapped arguments, dropped checks.

Each is found by its text, which must stand exactly once in its file; where a line is gone, choose another and say so here.
"""

from typing import NamedTuple


class Bug(NamedTuple):
    """In `file` (below swd_lens), `old` becomes `new`; `first` are the test files (below tests) that are tried first."""

    file: str
    old: str
    new: str
    first: str


BUGS = [
    # base
    Bug(
        "base/divergence.py",
        "return (log_p.exp() * (log_p - log_q)).sum(-1)",
        "return (log_p.exp() * (log_q - log_p)).sum(-1)",
        "base",
    ),
    Bug("base/divergence.py", "self.targets = tokens[:, 1:]", "self.targets = tokens[:, :-1]", "base circuits/test_fidelity.py"),
    Bug(
        "base/settings.py",
        "self.above is None or value > self.above",
        "self.above is None or value >= self.above",
        "base solver/test_validate.py solver/test_spec.py",
    ),
    # solver
    Bug(
        "solver/support.py",
        "return _kth_smallest(magnitude.flatten(), n - k + 1)",
        "return _kth_smallest(magnitude.flatten(), max(n - k, 1))",
        "solver/test_support.py",
    ),
    Bug(
        "solver/support.py",
        "kept[ties[: k - int(kept.count_nonzero())]] = True",
        "kept[ties[: k - int(kept.count_nonzero()) + 1]] = True",
        "solver/test_support.py",
    ),
    Bug("solver/refine.py", "step = norm / curvature", "step = curvature / norm", "solver/test_refine.py"),
    Bug(
        "solver/metric.py",
        "return read / torch.where(self.scale > 0, self.scale, 1.0)",
        "return read * torch.where(self.scale > 0, self.scale, 1.0)",
        "solver/test_metric.py solver/test_anneal.py",
    ),
    Bug(
        "solver/metric.py",
        "matrix.mul_(1 - shrinkage).diagonal().add_(shrinkage)",
        "matrix.mul_(shrinkage).diagonal().add_(1 - shrinkage)",
        "solver/test_metric.py solver/test_anneal.py",
    ),
    Bug(
        "solver/anneal.py",
        "block.dual *= rho_before / phase.rho",
        "block.dual *= phase.rho / rho_before",
        "solver/test_anneal.py solver/test_solve.py",
    ),
    Bug(
        "solver/budget.py",
        "return int(round(d_in * d_out * (1 - sparsity), 6))",
        "return int(d_in * d_out * (1 - sparsity))",
        "solver/test_budget.py",
    ),
    # tasks and hosts
    Bug("tasks/split.py", "(self.answers - self.distractors)", "(self.distractors - self.answers)", "tasks/test_task.py"),
    Bug(
        "tasks/text.py",
        "((rows < 0) | (rows >= model.cfg.d_vocab))",
        "((rows < 0) | (rows > model.cfg.d_vocab))",
        "tasks/test_text.py",
    ),
    Bug(
        "tasks/streams.py",
        "size = min(batch_size, self.n_rows - start)",
        "size = min(batch_size, self.n_rows - start + 1)",
        "tasks/test_streams.py",
    ),
    Bug(
        "hosts/attention.py",
        "flipped = torch.cat([-second, first], -1)",
        "flipped = torch.cat([second, -first], -1)",
        "analysis/test_qk_parts.py analysis/test_qk_replay.py bridge/test_qk.py",
    ),
    Bug(
        "hosts/attention.py",
        "scale, cap = d_head**-0.5, None",
        "scale, cap = d_head**0.5, None",
        "analysis/test_qk_parts.py bridge/test_qk.py",
    ),
    # units
    Bug(
        "units/factors.py",
        "return (self.read != 0).sum(0) + (self.write != 0).sum(1)",
        "return (self.read != 0).sum(0) - (self.write != 0).sum(1)",
        "units/test_factors.py",
    ),
    Bug(
        "units/factors.py",
        "return 1.0 - self.edges / (self.d_in * self.d_out)",
        "return self.edges / (self.d_in * self.d_out)",
        "units/test_factors.py",
    ),
    Bug(
        "units/match.py",
        "if (f.d_in, f.d_out) != (site.d_in, site.d_out):",
        "if (f.d_in, f.d_in) != (site.d_in, site.d_in):",
        "units/test_attach.py base/test_errors.py",
    ),
    Bug(
        "units/match.py",
        "((probe.input.double() - constant) / ratio)",
        "((probe.input.double() + constant) / ratio)",
        "units/test_match.py units/test_probe.py",
    ),
    Bug("units/match.py", "if min(errors) > _TOLERANCE:", "if min(errors) < 0:", "units/test_match.py base/test_errors.py"),
    Bug(
        "units/integrity.py",
        "return y if offsets is None else y + offsets",
        "return y if offsets is None else y - offsets",
        "units/test_probe.py units/test_match.py",
    ),
    # factorization
    Bug(
        "factorization/grams.py",
        "cross = crosses[name] / max(grams.n_routed.get(name, grams.n_tokens), 1)",
        "cross = crosses[name]",
        "factorization/test_grams_corrected.py factorization/test_grams.py",
    ),
    Bug(
        "factorization/checkpoint.py",
        "if not 1 <= number <= count:",
        "if not 0 <= number <= count:",
        "factorization/test_checkpoint.py",
    ),
    Bug(
        "factorization/allocate.py",
        "total / (self.rows.shape[0] * (self.rows.shape[1] - 1))",
        "total / (self.rows.shape[0] * self.rows.shape[1])",
        "factorization/test_allocate.py",
    ),
    # circuits
    Bug(
        "circuits/measure.py",
        "return rows[self.of] >= self.value",
        "return rows[self.of] > self.value",
        "circuits/test_curve.py circuits/test_micro.py",
    ),
    Bug(
        "circuits/curve.py",
        "area([abs(1.0 - value) for value in f])",
        "area([1.0 - value for value in f])",
        "circuits/test_curve.py",
    ),
    Bug(
        "circuits/contributions.py",
        "(difference.double() * total / steps)",
        "(difference.double() * total / (steps + 1))",
        "circuits/test_attribution.py",
    ),
    Bug(
        "circuits/refine.py",
        "(self._margins(kept).mean(1) - self.zero) / self.whole",
        "(self._margins(kept).mean(1) + self.zero) / self.whole",
        "circuits/test_refine.py",
    ),
    Bug("circuits/fidelity.py", "return self.ce - self.ce_dense", "return self.ce_dense - self.ce", "circuits/test_fidelity.py"),
    # train
    Bug(
        "train/baselines/coders.py",
        "return torch.relu((x - self.b_dec) @ self.W_enc + self.b_enc)",
        "return torch.relu((x + self.b_dec) @ self.W_enc + self.b_enc)",
        "train/baselines",
    ),
    Bug(
        "train/finetune/spec.py",
        "left = (steps - step + 1) / (steps - warm)",
        "left = (steps - step) / (steps - warm)",
        "train/finetune",
    ),
    Bug(
        "train/finetune/fit.py",
        '"ce+kl": ce + self.spec.kl_weight * kl',
        '"ce+kl": ce - self.spec.kl_weight * kl',
        "train/finetune",
    ),
    Bug(
        "train/engine.py",
        "return math.sqrt(total / sum(t.numel() for t in tensors))",
        "return total / sum(t.numel() for t in tensors)",
        "train",
    ),
    # analysis
    Bug(
        "analysis/qk/replay.py",
        "without = intact - contribution",
        "without = intact + contribution",
        "analysis/test_qk_replay.py",
    ),
    Bug(
        "analysis/qk/screen.py",
        "key_head = head // heads.group",
        "key_head = head % heads.group",
        "analysis/test_qk_screen.py bridge/test_qk.py",
    ),
    Bug(
        "analysis/graph/pruning.py",
        "rest = z - contribution.sum(0)",
        "rest = z + contribution.sum(0)",
        "analysis/test_graph_pruning.py",
    ),
    # study, report, cli
    Bug(
        "study/replacement.py",
        "return 1.0 - self.after.ce_delta / self.before.ce_delta",
        "return 1.0 - self.before.ce_delta / self.after.ce_delta",
        "study/test_replacement.py",
    ),
    Bug(
        "study/generate.py",
        "values = values.double() / temperature + noise",
        "values = values.double() * temperature + noise",
        "study/test_generate.py",
    ),
    Bug("report/wording.py", "fixed(100 * value, digits)", "fixed(value, digits)", "report"),
    Bug(
        "cli/options.py",
        "return first_rows(rows[: len(rows) - n_heldout], wanted), rows[-n_heldout:]",
        "return first_rows(rows, wanted), rows[-n_heldout:]",
        "cli",
    ),
]
