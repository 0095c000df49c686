"""Entry point of the ``penstock`` command and of ``python -m penstock``."""

import os
import sys


def main() -> None:
    """Run the command; neither it nor a Python process that it starts imports from the current folder."""
    os.environ["PYTHONSAFEPATH"] = "1"
    if sys.path[:1] == [os.getcwd()] and not sys.flags.safe_path:  # `python -m` puts it there
        del sys.path[0]
    from penstock.cli import main as run

    run()


if __name__ == "__main__":
    main()
