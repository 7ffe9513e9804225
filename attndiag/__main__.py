"""`python -m attndiag`: the same as the command `attndiag`."""

from __future__ import annotations

from attndiag.cli import main

if __name__ == "__main__":
    main()
