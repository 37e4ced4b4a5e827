"""Rules for settings that are left to the matrix ("auto"), with what each was measured against.

1. By its shape: precision (`DOUBLE_UP_TO`), and by that the number of alternations (`automatic_alternations`), where in them
   the full Gram begins (`GRAM_FROM`), and how far budgets move (`automatic_balance`).
2. By its Gram and its budgets: how far the Gram is shrunk (`automatic_shrinkage`), where the penalty ends (`automatic_rho_end`).
"""

# Shrinkage "auto" is d_in / tokens, at most this (solver.md, point 6). Real text through an encoder layer, d_in 384 and
# 1,536: at 1,024, 4,096 and 16,384 tokens it lowers the held-out error by 23, 7 and 1 % (geometric means).
MOST_SHRINKAGE = 0.3

# Precision "auto" is float64 for matrices of at most this many entries (256 x 512). Choosing supports amplifies rounding: in
# float32 another processor or number of threads ends with half of the entries elsewhere, in float64 with the same ones (16
# factorizations of the embedded model: no support entry differs, products differ by 1e-13). The price is 1.5 to 2 times the time,
# and twice the memory.
DOUBLE_UP_TO = 2**17

# A unit that starts as one of a named side's coordinates keeps that one and a few more beside it. Of K; what it buys and costs
# is in tests/benchmarks/RESULTS.md (bases): more lowers the error and makes a task's circuit dearer.
NAMED_SIDE_SHARE = 0.03

# Where units keep a named long side's coordinates, nearly all of the error is in which few entries the factor between the two
# has. ADMM over-relaxes that one by RELAXATION, damps the other (1.5 - RELAXATION / 2), which then takes one step, and needs
# fewer alternations. Held-out error and time over those without, block 7 of SmolLM2, s = .5: mlp_out from inputs .98 in .64,
# mlp_in from outputs .99 in .51, attn_v from inputs .93 in .55; with 3 / 8 of the alternations 1.05, 1.05, .98; with all of them
# attn_v .90. Not in float64: attn_v gains, but of the embedded model's MLPs the error is 1.04 to 1.27, and KL 1.07 to 1.43, with
# all of the alternations, too. Not for a short or equal side (576 x 192 from outputs 1.22, 576 x 576 1.38, with 3 / 8) nor for
# .15 of K between units and coordinates (1.36): there what is over-relaxed is no small part.
NAMED_SIDE_ALTERNATIONS = 5 / 8
RELAXATION = 1.8

# Alternations "auto", in float32 and in float64, where each takes about twice the time. Each doubling lowers the error by 8 to
# 15 %. Golden rows (float32): 64 have 1.02 of the error of 72, with twice the units 1.04. The embedded model's attn_o at s = .5
# (float64): 72 have .89 of the error of 56.
ALTERNATIONS = {"float32": 64, "float64": 56}

# Without a Gram one costs two thirds. Golden rows without the MLP's, over 108 alternations before budgets grew: as many units
# .984 with 108, .991 with 96, 1.003 with 84; twice as many .92 with 108, .955 with 84.
ALTERNATIONS_ZERO_DATA = 84  # in float32

# When the full Gram begins to take part in the alternation, as a share of it, and how much of the Gram at once. An alternation
# with it costs twice one without. Golden rows (float32, 72 alternations), error over that of from .5 on, by and by from nothing:
# from .5, half at once, .99; from .65 and from .7 1.00, from .7 in .83 of the operations (twice the units .79); from .8 1.016 in
# .75, but 5 to 8 % worse with a Gram of strong correlations (768 x 3072), where .7 is 0 to 1 %; from .7, all at once, 1.05; left
# to the refinement (56 alternations) 1.4. Four of SmolLM2's matrices from .7: 1.005. In float64, where matrices are small, time
# is not what is short: the embedded model from .7 1.01, from .5 with half at once .98.
GRAM_FROM = {"float32": 0.7, "float64": 0.5}
GRAM_AT_FIRST = {"float32": 0.5, "float64": 0.0}

# The balance of matrices whose long side is at most so many times the short one. Held-out error over that of fixed budgets, which
# give the short side's factor a third of K at s = .5; they end with half of it each. Square ones of SmolLM2 (queries, outputs, a
# part of a gate) and golden attn_out at s = .25, .5, .75, .9: .87 to .97, .89 to .95, .95 to 1.00, 1.00 to 1.02; without a Gram
# .86 and .89 (s = .5), .94 (.75). Sides as 1 to 1.25: .93 and .97, .98 and 1.00; to 1.5: .95 and .98, .98 and .99; to 2 and more:
# .98 to 1.01, 1.00 to 1.08. A fixed half is as good at s = .5 and .75, and 4 to 11 % worse at .25. In float64, where matrices are
# small, it costs half as much time again for .98 of the error (the embedded model, s = .5; 1.00 at .75).
BALANCE = 0.1
BALANCED_UP_TO = 1.5

# Settings that a small product of sparse factors has at least (start.py, `is_product`): with them "best" finds what only "deep"
# found. F1 without and with them: compiled attn_o with noise of .001 to .1 of its norm (sixteen matrices) .86 to .98 and 1.00;
# planted ones (64 x 32, 6 + 6 entries, means of two) .78 and .91 at noise .02, .72 and .85 at .1, .60 and .65 at .3. It takes 1
# to 3 s, not .2. Twice the rotations are .003 better in twice the time; without births a compiled one has .93, and with 240
# alternations and twice the births, too.
PATIENCE = {"births": 10, "rotations": 100}
# Each is tried, and the lower error counts. With .5 alone five of twenty compiled matrices that had no part in these choices
# (noise .01) ended at F1 .93, with 200 times the error of the units they were made of; with both, of eighty others two.
BALANCES = (0.5, 1.0)

# The penalty's end "auto": `automatic_rho_end`, between these two, with a Gram and without one.
RHO_END_CALIBRATED = (0.4, 0.5)
RHO_END_ZERO_DATA = (0.7, 0.8)
ONE_SIDED = 0.05  # the share of K that a factor has where nearly all entries are the other's


def automatic_shrinkage(shrinkage: float | int | str, tokens: int | None, d_in: int) -> float:
    """A share that is given, or "auto": d_in / tokens, at most MOST_SHRINKAGE; 0 where their number is not known."""
    if not isinstance(shrinkage, str):
        return float(shrinkage)
    return 0.0 if tokens is None else min(MOST_SHRINKAGE, d_in / max(tokens, 1))


def automatic_alternations(precision: str, *, calibrated: bool, relaxed: bool) -> int:
    """The number of alternations "auto" of a matrix that is solved in this precision, with a Gram or without."""
    plain = ALTERNATIONS_ZERO_DATA if precision == "float32" and not calibrated else ALTERNATIONS[precision]
    return round(NAMED_SIDE_ALTERNATIONS * plain) if relaxed else plain


def automatic_balance(d_in: int, d_out: int, precision: str) -> float:
    """The balance "auto" of a matrix with as many units as its short side has coordinates."""
    squarish = max(d_in, d_out) <= BALANCED_UP_TO * min(d_in, d_out)
    return BALANCE if precision == "float32" and squarish else 0.0


def automatic_rho_end(sparsity: float, least_share: float, shrinkage: float, *, calibrated: bool) -> float:
    """The penalty's end "auto", lower where factors are dense and the Gram is trusted.

    Up to s = .5 the lower one, from s = .75 on the upper one, between them linearly; a Gram that is shrunk as far as it may be
    (MOST_SHRINKAGE) has the upper one at every s, one that is shrunk less stands between; so has a factor with fewer than
    ONE_SIDED of all entries.

    Golden rows, 72 alternations, error over that of .5: s = .5 .973 with .4 and .998 with .3; s = .25 .984 with .4; s = .625 .996
    with .4; s = .75 1.03 with .35, 1.02 with .6; s = .875 1.01 with .4, .995 with .6. Shrunk by .1, at s = .5: .993 with .4 and
    with .45; by .3 1.03 with .4. mlp_out from its inputs (.03 of K) at s = .5: 1.03 with .4. Without a Gram .7 has .994 of the
    error of .8 at s = .5, 1.001 of it at .75. The embedded model at s = .5: .973 with .4.

    least_share: of K, that the factor of fewer entries has; shrinkage: of the Gram; without one it does not matter.
    """
    lower, upper = RHO_END_CALIBRATED if calibrated else RHO_END_ZERO_DATA
    trusted_less = shrinkage / MOST_SHRINKAGE if calibrated else 0.0
    rise = min(max((sparsity - 0.5) / 0.25, trusted_less, 0.0), 1.0)
    return lower + (upper - lower) * (1.0 if least_share < ONE_SIDED else rise)
