"""From a host and a pattern of sites to a FactorSet.

1. matrices.py, job.py: what is to be factorized and how, checked. estimate.py: what it will cost.
2. grams.py: what a matrix reads, and what it should write. gradients.py: how the loss sees that; basis.py: what
   follows from it.
3. stages.py, residuals.py: which matrices are calibrated together, and the host as it stands then.
4. solve.py, workers/: one matrix, here or elsewhere.
5. factorize.py: the call that goes through these; checkpoint.py keeps its folder.
6. allocate.py, allocation.py: budgets that differ between matrices.
"""
