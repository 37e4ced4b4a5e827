"""How the embedded model was made: its network in plain torch, its training, its scores."""
