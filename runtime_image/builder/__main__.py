"""The builder's command line: `python -m runtime_image.builder --help`."""

from __future__ import annotations

import signal
import sys

from runtime_image.builder.cli import main

# Whoever is told to stop cleans up first: a hostile tree is not for its parent to remove.
signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
sys.exit(main())
