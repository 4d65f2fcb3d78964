"""What trials on two shares of a graph tell of the whole."""

import pytest

from gact_graph.api.budget.runs import Runs, Trials
from gact_graph.api.budget.trial import Trial


def trial(share: float) -> Trial:
    """The first step takes 30 and 10 for the whole, each later one 5 and 100."""
    return Trial((round(30 + 10 * share), round(5 + 100 * share)), 4, 2, share)


def test_each_step_grows_for_itself() -> None:
    found = Trials([0.1, 0.2], [trial(0.1), trial(0.2)], 1.0).growth
    assert found.peak.at(0.1) == 31 and found.peak.at(1.0) == 105
    assert found.mixed(found, 0.5) == found


def test_a_share_that_would_not_keep_to_the_budget_is_not_tried() -> None:
    shares = []

    def run(share: float, blocks: float) -> Trial:
        shares.append(share)
        return Trial((round(16_000 * share),), 4, 2, share)

    found = Runs(run, 1.0).within(8000)
    assert max(shares) <= 0.5 and found.growth.peak.at(1.0) == pytest.approx(16_000)
    assert Runs(run, 1.0).within(32_000).shares == [1.0]


def test_blocks_of_small_shares_do_not_count_as_blocks_of_the_whole() -> None:
    peaks = []

    def run(share: float, blocks: float) -> Trial:
        peaks.append(round(16_000 * share + 4000 * blocks))
        return Trial((peaks[-1],), 4, 2, share)

    found = Runs(run, 1.0).within(8000)
    assert found.growth.peak.at(1.0) == pytest.approx(20_000)
    assert max(peaks) <= 8000
    assert Runs(run, 1.0).within(20_000).trials[0].peak_bytes == 20_000

    # A large graph, of which a quarter is tried: that takes 8,000, and the whole 20,000.
    assert Runs(run, 0.25).within(8000).shares == [0.0625, 0.125]
    assert Runs(run, 0.25).within(8000).growth.peak.at(1.0) == pytest.approx(20_000)
    peaks.clear()
    assert Runs(run, 0.25).within(5000).growth.peak.at(1.0) == pytest.approx(20_000, rel=1e-3)
    assert max(peaks) <= 5000


def test_the_peak_of_a_part_is_at_the_moment_of_the_whole() -> None:
    """Of the whole 100,000 at a moment without messages; of a part more at one with a block."""

    def run(share: float, blocks: float) -> Trial:
        return Trial((round(max(100_000 * share, 20_000 * share + 30_000 * blocks)),), 4, 2, share)

    for found in (Runs(run, 0.25).first(), Runs(run, 0.25).within(200_000)):
        assert found.growth.peak.at(1.0) == pytest.approx(100_000)


def test_time_is_that_of_blocks_of_the_usual_size() -> None:
    def run(share: float, blocks: float) -> Trial:
        return Trial((round(16_000 * share),), 4, 2, 8 * share / blocks)

    for largest in (0.25, 1.0):
        assert Runs(run, largest).first().growth.seconds.at(1.0) == pytest.approx(8.0)


def test_what_only_a_first_step_takes_is_not_counted() -> None:
    shares: list[float] = []

    def run(share: float, blocks: float) -> Trial:
        once = 0 if shares else 900
        shares.append(share)
        return Trial((once + round(16_000 * share),), 4, 2, share)

    assert Runs(run, 0.5).first().growth.peak.at(1.0) == pytest.approx(16_000)
    shares.clear()
    assert Runs(run, 1.0).first().growth.peak.at(1.0) == 16_000


def test_a_model_that_takes_no_part_of_a_graph_is_tried_on_the_whole() -> None:
    def run(share: float, blocks: float) -> Trial:
        if share < 1:
            raise IndexError("index 90 is out of bounds for dimension 0 with size 10")
        return Trial((100,), 4, 2, 1.0)

    for found in (Runs(run, 1.0).first(), Runs(run, 1.0).within(8000)):
        assert found.shares == [1.0] and found.growth.peak.at(1.0) == 100
