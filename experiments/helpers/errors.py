"""Errors that end a command without a traceback: one line for the user, and an exit code."""

from __future__ import annotations


class ExperimentError(Exception):
    """An error that the user can fix; the text is one line and names a remedy."""

    exit_code = 1


class UsageError(ExperimentError):
    """A flag that cannot be used."""

    exit_code = 2


class ResultsError(ExperimentError):
    """The folder of ``--out`` cannot be used, or holds something else."""


class LockedError(ResultsError):
    """Another job works in the folder of ``--out``."""

    exit_code = 2
