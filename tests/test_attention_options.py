"""Every option of an attention layer, and every pair of them, against the oracle."""

import itertools

import pytest
from configurations import FACTORS, OPTIONS, Configuration, check_oracle, pairwise

PAIRS = pairwise()


@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_is_its_formula(name):
    check_oracle(Configuration.of(**OPTIONS[name]))


@pytest.mark.parametrize("row", range(len(PAIRS)))
def test_options_together_are_their_formulas(row):
    check_oracle(Configuration.of(**PAIRS[row]))


def test_every_two_levels_meet():
    for (one, ones), (two, twos) in itertools.combinations(FACTORS.items(), 2):
        for levels in itertools.product(ones, twos):
            assert any((row[one], row[two]) == levels for row in PAIRS)
