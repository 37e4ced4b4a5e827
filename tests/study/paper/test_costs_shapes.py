"""Shapes of hosts."""

from swd_lens.study.paper import costs


def test_shapes_of_gpt2_are_the_papers():
    gpt2 = costs.SHAPES["gpt2"]
    assert gpt2.layers * gpt2.block_weights == 84_934_656  # method.md 0.1
    assert gpt2.sites("mlp_out")[8] == (8, (3072, 768))
    assert len(gpt2.sites("all")) == 48
    assert len(costs.SHAPES["smollm2"].sites("all")) == 210
    # 2 operations per weight and token, and attention's two products over the context.
    assert gpt2.forward(1, 1024, 12) == 2 * 84_934_656 + 12 * 4 * 1024 * 768


def test_a_loaded_host_has_its_own_shape():
    import swd_lens as swd

    model = swd.load_default_model()
    assert costs.Shape.of(model) == costs.SHAPES["default"]
