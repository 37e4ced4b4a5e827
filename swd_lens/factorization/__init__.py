"""From a host and a pattern of sites to a FactorSet.

1. grams.py, targets.py: what a matrix reads, and what it should write.
2. stages.py, residuals.py: which matrices are calibrated together, and the host as it stands then.
3. solve.py, workers/: one matrix, here or elsewhere.
4. factorize.py: the call that goes through these; job.py, checkpoint.py, shards.py keep its arguments and its folder.
5. resources/: what it will cost. allocate.py: budgets that differ between matrices.
"""
