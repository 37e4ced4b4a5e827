"""Items about the quality of a replaced matrix."""

import pytest

from tests.study.paper.conftest import table


@pytest.mark.filterwarnings("ignore:the mean margin of")
@pytest.mark.slow
def test_calibrated_factors_stand_beside_zero_data_ones(every):
    item = every[1]["zero-data"]
    norms = {point["calibration"]: point["relative_frobenius"] for point in item.numbers["points"]}
    assert f"s=0.5 {norms['zero-data']:.3f} beside {norms['calibrated']:.3f}" in item.findings[0]
    methods = set(table(item, 1)["method"])
    assert {"Neurons", "Neurons pruned s=0.5", "TC", "VPD"} <= methods and "SVD pruned s=0.5" not in methods


@pytest.mark.filterwarnings("ignore:the mean margin of")
@pytest.mark.slow
def test_tokens_to_the_quality_of_swd_are_said_of_every_method(every):
    item = every[1]["data-efficiency"]
    reached = table(item, 1)
    (reference,) = set(reached["reference"])
    assert reference.startswith("SWD (paper) s=0.5 at 512 tokens")
    assert all(f"{method} " in item.findings[1] for method in reached["method"]) and reference in item.findings[1]
