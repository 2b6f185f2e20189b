"""The command line: `shoal`."""

from __future__ import annotations


def main() -> None:
    """The console script's entry; the program is loaded only here."""
    from shoal.cli.app import app

    app()
