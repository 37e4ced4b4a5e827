"""Values that are learned: fine-tuned factors (finetune/) and trained baselines (baselines/)."""
