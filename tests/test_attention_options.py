"""Every option of an attention layer, and every pair of them, against the oracle."""

import pytest
from configurations import OPTIONS, Configuration, check_oracle, pairs

PAIRS = pairs()


def each(table):
    return pytest.mark.parametrize("name", table)


@each(OPTIONS)
def test_an_option_is_its_formula(name):
    check_oracle(Configuration.of(**OPTIONS[name]))


@each(PAIRS)
def test_two_options_together_are_their_formulas(name):
    check_oracle(Configuration.of(**PAIRS[name]))
