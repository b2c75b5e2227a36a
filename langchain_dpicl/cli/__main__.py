"""``python -m langchain_dpicl.cli``."""

import sys

from langchain_dpicl.cli import main

sys.exit(main())
