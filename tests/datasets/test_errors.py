"""The error of loaders: one line that names its kind."""

from datasets import DatasetError
from datasets.errors import first_line


def test_first_line_is_one_line_and_names_the_kind():
    assert first_line(OSError("disk full\nmore words")) == "OSError: disk full"
    assert first_line(KeyError()) == "KeyError"
    assert first_line(ValueError("x" * 999)) == "ValueError: " + "x" * 200 + "..."


def test_first_line_of_our_own_error_is_its_words():
    assert first_line(DatasetError("Expected a (got b)")) == "Expected a (got b)"
