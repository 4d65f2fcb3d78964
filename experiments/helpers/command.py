"""The frame of a command: its flags, its folder of results, and one line about each error."""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NoReturn

import torch
from rich.console import Console

import gact_graph
from datasets import DatasetError
from experiments.helpers.display import make_console, say, show
from experiments.helpers.errors import ExperimentError, UsageError
from experiments.helpers.kept import Kept, hold_folder
from experiments.helpers.origin import origin
from experiments.helpers.ranks import rank
from experiments.helpers.summary import dataset_name
from experiments.helpers.tables import Table
from experiments.helpers.values import (
    parse_bits,
    parse_count,
    parse_device,
    parse_draws,
    parse_json_file,
    parse_path,
)
from gact_graph.support.memory.limits import is_out_of_memory

_DOES_NOT_FIT = 3
INTERRUPTED = 130  # as shells report a process that Ctrl-C ended

Flag = tuple[str, dict[str, Any]]


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        # argparse would print its usage, many lines long, and end the process.
        raise UsageError(message)


def flag(
    name: str, parse: Callable[[str], Any] = str, default: Any = None, text: str = "", **more: Any
) -> Flag:
    """Describe a flag; its help ends with its default, if any."""
    shown = text if default is None else f"{text} (default: {default})".strip()
    return name, {"type": parse, "default": default, "help": shown, **more}


def number(name: str, default: int | None = None, text: str = "") -> Flag:
    """Describe a flag that takes a whole number of at least 1."""
    return flag(name, parse_count, default, text, metavar="N")


def several(name: str, parse: Callable[[str], Any], default: str | None, text: str = "") -> Flag:
    """Describe a flag that takes values separated by commas; each counts once."""

    def values(typed: str) -> list[Any]:
        return [parse(part) for part in dict.fromkeys(typed.split(","))]

    return flag(name, values, default, text, metavar="N,N")


def choice(name: str, known: Iterable[str], default: str | None = None, text: str = "") -> Flag:
    """Describe a flag that takes one of some names."""
    return flag(name, str, default, text, choices=tuple(known))


def names(name: str, known: Iterable[str], default: str | None = None) -> Flag:
    """Describe a flag that takes names separated by commas, by default all of ``known``."""
    known = tuple(known)
    usual = ",".join(known) if default is None else default
    return flag(name, functools.partial(choose, name, known=known), usual, f"of {', '.join(known)}")


def draws(default: int | None = None, text: str = "of the noise") -> Flag:
    """Describe the flag that takes a number of draws."""
    return flag("--draws", parse_draws, default, text, metavar="N")


def switch(name: str, text: str) -> Flag:
    """Describe a flag without a value."""
    return name, {"action": "store_true", "help": text}


def needed(described: Flag) -> Flag:
    """Return the flag as a required one."""
    return described[0], described[1] | {"required": True}


def choose(flag: str, text: str, known: Iterable[str]) -> list[str]:
    """Read names separated by commas; each counts once.

    Raises:
        UsageError: If a name is not known.
    """
    chosen = list(dict.fromkeys(text.split(",")))
    for name in chosen:
        if name not in known:
            raise UsageError(f"Expected {flag} of {', '.join(known)} (got {name!r})")
    return chosen


DATASET = flag(
    "--dataset", default="digits", text="a name, FILE.npz or synthetic:NAME", metavar="D"
)
DATA_ROOT = flag("--data-root", parse_path, "data", "where named data sets lie", metavar="DIR")
DEVICE = flag("--device", parse_device, "auto", "cpu, cuda or cuda:N; auto prefers cuda")
GRAPH = (DATASET, DATA_ROOT, DEVICE)
BITS = flag("--bits", parse_bits, 4, "of the levels that quantize", metavar="B")
SIZES = (
    number("--hidden", text="channels, in place of the model's"),
    number("--layers", text="layers, in place of the model's"),
)
NO_TIMES = switch("--no-times", "do not record times: the machine does other work")
_RESULTS = "where results are written; most commands resume if the path is the same"
OUT = flag("--out", parse_path, text=_RESULTS, metavar="DIR")
OUT_NEEDED = needed(OUT)
OUT_FILE = flag("--out", parse_json_file, text=_RESULTS, metavar="FILE.json")


class Args(argparse.Namespace):
    """The flags of a command, and its output.

    Attributes:
        console: Prints, only in the first process of ``torchrun``.
        origin: See :func:`experiments.helpers.origin.origin`.
    """

    console: Console
    origin: dict[str, Any]

    def say(self, text: str) -> None:
        """Print one line."""
        say(self.console, text)

    def show(self, title: str, table: Table) -> None:
        """Print a table."""
        show(self.console, title, table)

    def keep(
        self,
        file: str | None,
        *settings: str,
        derive: Callable[[dict[str, Any]], dict[str, Any]] = lambda content: {},
        **more: Any,
    ) -> Kept:
        """Return the results from which the command continues.

        Args:
            file: The name of the file in the folder of ``--out``; None if ``--out`` is the file.
            *settings: Flags on which the results depend. The graph, the device and the number of
                threads are settings of every command that has them.
            derive: See :class:`experiments.helpers.kept.Kept`.
            **more: Further settings.
        """
        head: dict[str, Any] = {"threads": torch.get_num_threads()}
        if hasattr(self, "dataset"):
            head["dataset"] = dataset_name(self.dataset)
        if hasattr(self, "device"):
            head["device"] = str(self.device)
        head |= {name: getattr(self, name) for name in settings} | more
        path = self.out if file is None or self.out is None else self.out / file
        return Kept(path, head, self.origin, derive)


class Command:
    """One ``python -m experiments.NAME``, made by :func:`main`.

    A command whose ``--out`` is a folder keeps other commands out of it. Under ``torchrun``, only
    the first process uses the folder.
    """

    def __init__(self, work: Callable[[Args], None], flags: tuple[Flag, ...]) -> None:
        self._work, self._flags = work, flags
        self._name = Path(work.__code__.co_filename).stem
        self._text = work.__globals__["__doc__"].splitlines()[0]

    def __call__(self, argv: list[str] | None = None) -> int:
        """Return the exit code: 0, 1 (data, files), 2 (flags), 3 (no budget fits), 130 (Ctrl-C)."""
        argv = sys.argv[1:] if argv is None else argv
        args = Args(out=None)

        def work() -> None:
            self.parse(argv, args)
            args.origin = origin(self._name, argv)
            args.console = make_console(quiet=rank() > 0)
            if rank() > 0:
                args.out = None
            in_folder = args.out is not None and any(f in (OUT, OUT_NEEDED) for f in self._flags)
            with hold_folder(args.out, args.say) if in_folder else nullcontext():
                self._work(args)

        return exit_code(self._name, work, lambda: args.out)

    def parse(self, argv: list[str] | None = None, into: Args | None = None) -> Args:
        """Read flags.

        Raises:
            UsageError: If a flag is wrong; the message is one line.
            SystemExit: After ``--help``.
        """
        for text in argv or ():
            # Reports quote the command line.
            if "\0" in text or text.encode(errors="replace").decode() != text:
                raise UsageError(f"Expected every argument to be UTF-8 text (got {text!a})")
        program = f"python -m experiments.{self._name}"
        parser = _Parser(prog=program, description=self._text, allow_abbrev=False)
        for name, options in self._flags:
            parser.add_argument(name, **options)
        return parser.parse_args(argv, into or Args())


def main(*flags: Flag) -> Callable[[Callable[[Args], None]], Command]:
    """Make a command of a function, with the name and the description of its module."""
    return lambda work: Command(work, flags)


def exit_code(
    program: str, work: Callable[[], None], out: Callable[[], Path | None] = lambda: None
) -> int:
    """Do the work; print one line on an error, and return the exit code."""
    try:
        work()
    except KeyboardInterrupt:
        kept = "nothing is kept without --out"
        if out() is not None:
            kept = f"finished results are in {out()}, and the same command goes on from there"
        print(f"Interrupted: {kept}.", file=sys.stderr)
        return INTERRUPTED
    except (ExperimentError, DatasetError, gact_graph.MemoryBudgetError) as error:
        print(f"{program}: {error}", file=sys.stderr)
        if isinstance(error, gact_graph.MemoryBudgetError):
            return _DOES_NOT_FIT
        return getattr(error, "exit_code", 1)
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        print(
            f"{program}: the device's memory is full: take a smaller graph, fewer --bits, --level "
            "CB2, or smaller --hidden, --heads or --layers",
            file=sys.stderr,
        )
        return 1
    return 0
