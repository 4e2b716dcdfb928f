"""`interlock serve`: the OpenAI-compatible server."""

from __future__ import annotations

import argparse

from interlock.cli.console import progress_bars
from interlock.cli.options import add_settings, settings_of
from interlock.settings import Settings


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_settings(parser, "server", "engine")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Check settings and plugins (quick, without torch), then serve until told to stop."""
    settings = settings_of(args)
    from interlock.server.run import run_server

    _download_visibly(settings)
    return run_server(settings)


def _download_visibly(settings: Settings) -> None:
    """Fetch a model that is not there yet with a progress bar, if anybody is watching.

    Without a terminal the server downloads it itself, and answers /health meanwhile.
    """
    from interlock.server.run import bind
    from interlock.weights.resolve import ALIASES, is_pulled, pull

    name = settings.engine.model
    if name not in ALIASES or is_pulled(name):
        return
    with progress_bars() as bars:
        if bars is not None:
            # A busy port must be found before minutes of download, not after them.
            bind(settings.server.host, settings.server.port).close()
            pull(name, bars.download(name))
