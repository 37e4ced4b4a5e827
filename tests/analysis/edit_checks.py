"""What tests of edits start from: a prompt, other prompts of two lengths, a text."""

from tests.micro import random_tokens

PROMPT, TEXT = random_tokens(1, 6)[0], random_tokens(7, 9, seed=4)
OTHERS = [row if i < 3 else row[:4] for i, row in enumerate(random_tokens(5, 7, seed=3))]
SITES = ("blocks.0.mlp_out", "blocks.0.attn_o")
