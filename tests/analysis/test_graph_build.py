"""How a graph is asked for, and what is refused."""

from types import SimpleNamespace

import pandas as pd
import torch

from swd_lens.analysis.graph import unit_graph
from tests.analysis.graph_checks import APART, TOKENS, all_units, random_factors, toy_graph
from tests.micro import toy_model
from tests.refusals import refuses


def test_one_unit_and_all_the_answers_there_are():
    graph = toy_graph(("attn_o",), units="blocks.0.attn_o/1", prompt=TOKENS, answers=99, keep=None)
    assert graph.nodes["kind"].value_counts().to_dict() == {"logit": 20, "unit": 1, "token": 1}


def test_units_are_named_by_site_glob_table_and_pair():
    model = toy_model()
    factors = random_factors(model, "attn_o", "mlp_out")
    whole = unit_graph(model, factors, all_units(factors), prompt=TOKENS, keep=None)
    for units in ("all", ["attn_o", "blocks.*.mlp_out"], pd.DataFrame(all_units(factors), columns=["site", "unit"])):
        assert unit_graph(model, factors, units, prompt=TOKENS, keep=None).edges.equals(whole.edges)
    mixed = unit_graph(model, factors, ["blocks.1.mlp_out", ("blocks.0.attn_o", 2)], answers=[3])
    drawn = mixed.nodes["node"][mixed.nodes["kind"] == "unit"].tolist()
    assert set(drawn) <= {"blocks.0.attn_o/2", *(f"blocks.1.mlp_out/{i}" for i in range(5))} and len(drawn) == 6
    refuses(ValueError, r"no site matches 'mlp_in'", unit_graph, model, factors, ["mlp_in"], prompt=TOKENS)


def test_what_cannot_be_drawn_is_refused():
    model = toy_model()
    factors = random_factors(model, *APART)
    units = all_units(factors)

    def refused(error: type[Exception], match: str, drawn=units, **settings) -> None:
        refuses(error, match, unit_graph, model, factors, drawn, **settings)

    refused(ValueError, r"no unit of blocks\.0\.mlp_in can speak.*attn_o, mlp_out", drawn=["blocks.0.mlp_in/1"])
    refused(ValueError, r"blocks\.0\.mlp_in/7 is not among .* \(0 to 4\)", drawn=["blocks.0.mlp_in/7"])
    refused(ValueError, r"blocks\.9\.mlp_in/0 is not among", drawn=[("blocks.9.mlp_in", 0)])
    refused(ValueError, "named twice", drawn=["blocks.0.mlp_in/1", ("blocks.0.mlp_in", 1)])
    refused(ValueError, "there are no units", drawn=[])
    refused(ValueError, "give one, prompt=", attention="frozen")
    refused(ValueError, "attention must be one of", attention="thawed")
    refused(ValueError, "cosine.*without one", prompt=TOKENS, normalize="cosine")
    refused(ValueError, "leave `tokens` out", prompt=TOKENS, tokens=torch.tensor([TOKENS]))
    refused(ValueError, "min_weight must be a number of at least 0, got -1", min_weight=-1)
    refused(ValueError, "answer 20 is no token id", prompt=TOKENS, answers=[20])
    refused(ValueError, "likeliest tokens are those of a prompt", answers=3)
    refused(ValueError, "answer 4 is named twice", prompt=TOKENS, answers=[4, 3, 4])
    refused(ValueError, "answers=True", prompt=TOKENS, answers=True)
    refused(ValueError, "no tokenizer", prompt="text")
    refused(ValueError, "one prompt, got 2", prompt=[TOKENS, TOKENS])
    coder = SimpleNamespace(reads="input", writes="output", encode=abs, decode=abs)
    refuses(TypeError, "no read and write vectors", unit_graph, model, {"blocks.0.mlp": coder}, ["blocks.0.mlp/1"])
