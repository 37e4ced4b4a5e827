"""Tests on a real pretrained model, which a wheel brings; skipped where it is not installed."""
