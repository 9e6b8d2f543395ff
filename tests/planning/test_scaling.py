"""Compute-optimal sizes against what Hoffmann et al. 2022 print: tables 2, 3 and A3, figure 4 and section D.4."""

import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf.planning.scaling import FRONTIERS, PUBLISHED, cheapest

# Printed projections: parameters, FLOPs, tokens. Source: Hoffmann et al. 2022, table 3 (approach 1) and table A3 (2 and 3).
TABLE: dict[int, tuple[tuple[float, float, float], ...]] = {
    1: (
        (400e6, 1.92e19, 8.0e9), (1e9, 1.21e20, 20.2e9), (10e9, 1.23e22, 205.1e9), (67e9, 5.76e23, 1.5e12),
        (175e9, 3.85e24, 3.7e12), (280e9, 9.90e24, 5.9e12), (520e9, 3.43e25, 11.0e12), (1e12, 1.27e26, 21.2e12),
        (10e12, 1.30e28, 216.2e12),
    ),
    2: (
        (400e6, 1.84e19, 7.7e9), (1e9, 1.20e20, 20.0e9), (10e9, 1.32e22, 219.5e9), (67e9, 6.88e23, 1.7e12),
        (175e9, 4.54e24, 4.3e12), (280e9, 1.18e25, 7.1e12), (520e9, 4.19e25, 13.4e12), (1e12, 1.59e26, 26.5e12),
        (10e12, 1.75e28, 292.0e12),
    ),
    3: (
        (400e6, 2.21e19, 9.2e9), (1e9, 1.62e20, 27.1e9), (10e9, 2.46e22, 410.1e9), (67e9, 1.71e24, 4.1e12),
        (175e9, 1.26e24, 12.0e12), (280e9, 3.52e25, 20.1e12), (520e9, 1.36e26, 43.5e12), (1e12, 5.65e26, 94.1e12),
        (10e12, 8.55e28, 1425.5e12),
    ),
}  # fmt: skip
OFF_LINE = 67e9


@pytest.mark.parametrize("approach", [1, 2])
def test_frontiers_are_the_least_squares_of_the_printed_projections(approach):
    on_line = [(math.log(c), math.log(n)) for n, c, _ in TABLE[approach] if n != OFF_LINE]
    a, log_k = statistics.linear_regression(*zip(*on_line, strict=True))
    assert (FRONTIERS[approach].a, FRONTIERS[approach].k) == pytest.approx((a, math.exp(log_k)), rel=1e-12)


@pytest.mark.parametrize("approach", [1, 2])
@pytest.mark.parametrize("row", range(9))
def test_rows_of_approaches_1_and_2(approach, row):
    parameters, flops, tokens = TABLE[approach][row]
    budget = FRONTIERS[approach].flops(parameters)
    # Measured: within 0.5% (FLOPs) and 2% (tokens, printed with two digits); the row of 67 billion is 3% and 7%
    # (approach 1), 7% and 7% (approach 2) low, since it lies beside the other rows' line.
    of_flops, of_tokens = (0.08, 0.08) if parameters == OFF_LINE else (0.005, 0.02)
    assert budget == pytest.approx(flops, rel=of_flops)
    assert FRONTIERS[approach].tokens(budget) == pytest.approx(tokens, rel=of_tokens)


@pytest.mark.parametrize("row", range(9))
def test_rows_of_approach_3(row):
    parameters, flops, tokens = TABLE[3][row]
    if parameters == 175e9:
        flops *= 10  # printed 1.26e24: a misprint, since 6 N D of the same row is 1.26e25
        assert 6 * parameters * tokens == pytest.approx(flops, rel=1e-3)
    budget = FRONTIERS[3].flops(parameters)
    # The unrounded constants lie above the table: from 2% and 6% in the smallest rows to 18% in the largest, as
    # the table's own slope is 0.459 against their 0.4565. In N at a given budget that is at most 8%.
    assert 1.0 < budget / flops < 1.20 and 1.0 < FRONTIERS[3].tokens(budget) / tokens < 1.20
    assert FRONTIERS[3].parameters(flops) == pytest.approx(parameters, rel=0.08)


def test_projections_that_the_text_prints():
    gopher = 5.76e23  # FLOPs, section 1
    assert FRONTIERS[1].parameters(gopher) == pytest.approx(67e9, rel=0.02)  # table 3
    assert 40e9 < FRONTIERS[2].parameters(gopher) < 70e9  # section 4: between 40 and 70 billion
    assert FRONTIERS[3].parameters(gopher) == pytest.approx(40e9, rel=0.02)  # figure 4
    assert FRONTIERS[1].parameters(1e21) == pytest.approx(2.86e9, rel=0.005)  # section D.4


@given(st.floats(1e17, 1e28), st.floats(0.5, 2.0))
def test_approach_3_is_where_the_loss_is_least(flops, other):
    best, tokens = FRONTIERS[3].parameters(flops), FRONTIERS[3].tokens(flops)
    assert 6 * best * tokens == pytest.approx(flops)
    assert PUBLISHED.loss(best, tokens) <= PUBLISHED.loss(best * other, flops / (6 * best * other)) * (1 + 1e-12)


@pytest.mark.parametrize("served", [1e10, 1e12])
def test_the_cheapest_with_use_is_that_of_a_grid(served):
    loss, e = PUBLISHED.loss(1e9, 20e9), math.exp(PUBLISHED.log_e)

    def tokens(n):  # L = E + A n^-alpha + B d^-beta, solved for d
        return (math.exp(PUBLISHED.log_b) / (loss - e - math.exp(PUBLISHED.log_a) * n**-PUBLISHED.alpha)) ** (
            1 / PUBLISHED.beta
        )

    least = (math.exp(PUBLISHED.log_a) / (loss - e)) ** (1 / PUBLISHED.alpha)
    grid = [least * 1.0005**k for k in range(2, 20000)]
    best = min(grid, key=lambda n: 6 * n * tokens(n) + 2 * n * served)
    size, text = cheapest(PUBLISHED, loss, served)
    assert (size, text) == pytest.approx((best, tokens(best)), rel=5e-3)  # the grid's step moves D more than N
    assert size < cheapest(PUBLISHED, loss, 0.0)[0]
