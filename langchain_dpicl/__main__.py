"""``python -m langchain_dpicl``: the command line."""

import sys

from langchain_dpicl.cli import main

sys.exit(main())
