"""``python -m chunkattn`` is the command ``chunkattn``."""

import sys

from chunkattn.cli import main

sys.exit(main())
