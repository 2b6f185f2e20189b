"""The builder's command line: `python -m runtime_image.builder --help`."""

from __future__ import annotations

import sys

from runtime_image.builder.cli import main

sys.exit(main())
