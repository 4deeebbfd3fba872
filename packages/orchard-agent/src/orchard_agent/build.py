"""`python -m orchard_agent.build`: compile the agent from the repository's Go sources where they changed."""

from __future__ import annotations

import sys

from orchard_agent.build_binaries import main

if __name__ == "__main__":
    sys.exit(main())
