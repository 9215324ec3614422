"""A parser of the command line that refuses in one line.

Owns the form of a refusal: ``tlt COMMAND: what is wrong`` on stderr and status 2, as for any other bad input, where
argparse would print its usage first. Knows nothing of the commands. Invariant: sub-parsers are of the same class.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import NoReturn


class OptionParser(argparse.ArgumentParser):
    """As ``argparse.ArgumentParser``; ``prog`` begins with ``tlt``."""

    def error(self, message: str) -> NoReturn:
        """Leave with status 2 and one line."""
        self._refuse(self.prog, message)

    def read(self, arguments: Sequence[str]) -> argparse.Namespace | int:
        """The options; or the exit status, where help was asked for or a refusal has been printed."""
        try:
            options, unknown = self.parse_known_args(arguments)
            if unknown:  # argparse would not say of which command
                self._refuse(f"{self.prog} {arguments[0]}", f"unknown: {' '.join(unknown)}")
        except SystemExit as stop:
            return stop.code if isinstance(stop.code, int) else 2
        return options

    def _refuse(self, prog: str, message: str) -> NoReturn:
        # "tlt check lossless" refuses as "tlt check", as it does where it finds the fault itself
        command, text = " ".join(prog.split()[:2]), " ".join(message.split())
        self.exit(2, f"{command}: {text}; see {prog} --help\n")
