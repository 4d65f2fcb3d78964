"""What trials on two shares of a graph tell of the whole."""

import pytest

from gact_graph.api.budget.runs import Runs, Trials
from gact_graph.api.budget.trial import Trial


def trial(share: float) -> Trial:
    """The first step takes 30 and 10 for the whole, each later one 5 and 100."""
    return Trial((round(30 + 10 * share), round(5 + 100 * share)), 4, 2, share)


def test_each_step_grows_for_itself() -> None:
    found = Trials([0.1, 0.2], [trial(0.1), trial(0.2)]).growth
    assert found.peak.at(0.1) == 31 and found.peak.at(1.0) == 105
    assert found.mixed(found, 0.5) == found


def test_a_share_that_would_not_keep_to_the_budget_is_not_tried() -> None:
    shares = []

    def run(share: float) -> Trial:
        shares.append(share)
        return Trial((round(16_000 * share),), 4, 2, share)

    found = Runs(run, 1.0).within(8000)
    assert max(shares) <= 0.5 and found.growth.peak.at(1.0) == pytest.approx(16_000)
    assert Runs(run, 1.0).within(32_000).shares == [1.0]
