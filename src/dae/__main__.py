"""The `dae` command, and `python -m dae`."""

import sys


def main() -> None:
    """Imports take a second or two, and Ctrl-C is to be answered in one line even then."""
    try:
        from dae.cli import main as command

        command()
    except KeyboardInterrupt:
        sys.stderr.write("dae: stopped\n")
        sys.exit(130)


if __name__ == "__main__":
    main()
