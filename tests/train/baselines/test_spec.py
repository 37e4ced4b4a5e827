"""Settings of the learned baselines: schedules, the recipes of the paper, what is refused."""

import pytest

from swd_lens.base.errors import TrainError
from swd_lens.train.baselines.spec import TRANSCODERS, VPD_KLS, VPD_RECONS, TranscoderSpec, VpdSpec, recipe


def test_schedules_and_the_papers_recipes():
    spec = VpdSpec(n_tokens=4096 * 101)
    assert spec.steps == 101 and spec.warmup() == 1
    assert spec.p(1) == 2.0 and spec.p(101) == pytest.approx(0.3) and spec.p(51) == pytest.approx(1.15)
    assert spec.rate(1) == pytest.approx(3e-4) and spec.rate(101) == pytest.approx(3e-5)
    assert TranscoderSpec().steps == 500 and TranscoderSpec().warmup() == 25
    assert TranscoderSpec().rate(1) == pytest.approx(4e-4 / 25)
    # token counts of method.md §0.6, in steps of 4,096; widths and penalties of the paper's appendix
    tc3k, tc24k = (recipe(TRANSCODERS, "paper", kind) for kind in ("mlp_out", "mlp"))
    assert (tc3k.steps, tc3k.units(3072, 768), tc3k.l1, tc3k.seed) == (500, 3072, 5e-5, 42)
    assert (tc24k.steps, tc24k.units(768, 768), tc24k.l1, tc24k.seed) == (1536, 24_576, 1.4e-4, 42)
    assert TRANSCODERS["paper_tc12k"].units(3072, 768) == 12_288
    recon, kl = VPD_RECONS["paper"], VPD_KLS["paper"]
    assert (recon.steps, recon.width, recon.hidden, recon.minimality, recon.seed) == (1024, 3072, 128, 1e-4, 0)
    assert (kl.steps, kl.width, kl.fidelity) == (400_000, 3072, "kl")
    assert VPD_KLS["spd_gpt2"].steps == 50_000
    # multiples are of the larger side: as wide as the paper's at GPT-2's shapes
    assert TranscoderSpec(width="1x").units(768, 3072) == 3072 and TranscoderSpec(width="32x").units(768, 768) == 24_576


def test_bad_settings_are_refused():
    """The words for bounds and choices are base/test_settings.py's."""
    for make, says in (
        (lambda: TranscoderSpec().changed({"widht": 3}), r"did you mean width\?"),
        (lambda: TranscoderSpec(width="3"), 'or "4x" for four times'),
        (lambda: VpdSpec(beta1=1.0), "beta1=1.0: give a finite number of at least 0 and below 1"),
        (lambda: recipe(TRANSCODERS, "papr", "mlp"), "no preset 'papr'; did you mean paper"),
        (lambda: VpdSpec(clip=float("inf")), "clip=inf: give a finite number above 0"),
        (lambda: VpdSpec(fidelity="kl", routing="some"), "routing='some': choose one of 'all', 'layerwise', 'subset'"),
        (lambda: VpdSpec(routing="subset"), "routing='subset' is for fidelity='kl': by reconstruction .*or call vpd_kl"),
        (lambda: VpdSpec(masks="binomial"), "masks='binomial' is for fidelity='kl'.* leave masks out"),
        (lambda: VpdSpec(adversarial=0.5), r"adversarial=0\.5 is for fidelity='kl'"),
    ):
        with pytest.raises(TrainError, match=says):
            make()
    transcoder, vpd = TranscoderSpec(), VpdSpec(fidelity="kl")
    for spec, name, value in (
        (transcoder, "loss", "huber"),
        (transcoder, "n_tokens", 0),
        (transcoder, "start", "mode"),
        (vpd, "p_end", 0),
        (vpd, "reduction", "max"),
        (vpd, "masks", "bernoulli"),
        (vpd, "adversary", "once"),
        (vpd, "persistent_steps", -1),
        (vpd, "persistent_rate", 0),
        (vpd, "persistent_warmup", 2),
        (vpd, "persistent_beta2", 1.0),
    ):
        with pytest.raises(TrainError, match=f"^{name}={value!r}: (give|choose) "):
            spec.changed({name: value})
