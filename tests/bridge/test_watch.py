"""Weights under an attachment to a bridge: whoever changes them is told. tests/units/test_projection.py asks more."""

import copy

import pytest
import torch

import swd_lens as swd
from swd_lens.base.errors import AttachError
from swd_lens.hosts import find_sites
from swd_lens.hosts.bridge.leaves import leaves_of_block
from swd_lens.units import attach
from swd_lens.units.factors import Factors
from tests import families
from tests.edited import SEEN_BY_VALUE, SEEN_BY_VERSION

WEIGHT = "{}: the host's matrix was changed while units are attached to it"
FACTORS = "{}: read, write or offsets were changed in place after these factors were made"
TOKENS = families.some_tokens(2, 7)
# A leaf of each class and of a packed site: family, site, kind of the leaf.
PLACES = [
    ("gpt2", "blocks.0.attn_qkv", "attn_k"),
    ("gpt2", "blocks.1.mlp_out", "mlp_out"),
    ("llama", "blocks.0.attn_o", "attn_o"),
    ("llama", "blocks.1.mlp_gate", "mlp_gate"),
]


def random_factors(bridge):
    generator, made = torch.Generator().manual_seed(0), {}
    for site in find_sites(bridge):
        read, write = (torch.randn(shape, generator=generator) for shape in ((site.d_in, 6), (6, site.d_out)))
        made[site.name] = Factors(read, write, provenance={"site": site.name})
    return made


@pytest.mark.quick_cases(5)
@pytest.mark.parametrize(
    ("edit", "family", "site", "kind"), [(edit, *PLACES[i % 4]) for i, edit in enumerate(SEEN_BY_VERSION | SEEN_BY_VALUE)]
)
def test_a_changed_weight_is_noticed(edit, family, site, kind):
    bridge = families.bridge(family)
    keys = list(bridge.state_dict())
    attachment = attach(bridge, random_factors(bridge))
    bridge(TOKENS)
    leaf = leaves_of_block(bridge.blocks[int(site[7])])[0][kind]
    if edit in SEEN_BY_VERSION:
        SEEN_BY_VERSION[edit](leaf, "weight")
        with pytest.raises(AttachError, match=WEIGHT.format(site)):
            bridge(TOKENS)
    else:
        SEEN_BY_VALUE[edit](leaf, "weight")
    with pytest.raises(AttachError, match=WEIGHT.format(site)):
        swd.find_sites(bridge)
    attachment.detach()
    bridge(TOKENS)
    assert list(bridge.state_dict()) == keys and "_standing_units" not in bridge.__dict__


def test_the_whole_of_a_host_s_part_is_loaded_anew():
    bridge = families.bridge("gpt2")
    with attach(bridge, random_factors(bridge)), torch.no_grad():
        attention = bridge.blocks[0].attn
        state = {key: value.clone() for key, value in attention.state_dict().items()}
        attention.load_state_dict(copy.deepcopy(state), strict=False)
        bridge(TOKENS)  # the same values
        attention.load_state_dict({key: 2 * value for key, value in state.items()}, strict=False)
        with pytest.raises(AttachError, match=WEIGHT.format("blocks.0.attn_qkv")):
            bridge(TOKENS)


def test_a_half_precision_host_watches_the_factors_and_not_its_copy_of_them():
    bridge = families.bridge("gpt2").to(torch.bfloat16)
    factors = random_factors(bridge)
    with attach(bridge, factors):
        bridge(TOKENS)
        factors["blocks.1.mlp_in"].write.mul_(3)
        with pytest.raises(AttachError, match=FACTORS.format("blocks.1.mlp_in")):
            bridge(TOKENS)


def test_a_deep_copy_watches_its_own():
    bridge = families.bridge("gpt2")
    with attach(bridge, random_factors(bridge)):
        other = copy.deepcopy(bridge)
        other(TOKENS)
        with torch.no_grad():
            leaves_of_block(other.blocks[1])[0]["mlp_out"]._parameters["weight"].mul_(2)
        with pytest.raises(AttachError, match=WEIGHT.format("blocks.1.mlp_out")):
            other(TOKENS)
        bridge(TOKENS)
