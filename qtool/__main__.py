"""The program ``qtool``, and ``python -m qtool`` where only a module's name is taken: ``torchrun -m qtool train …``.

The command line tells of an interrupt itself. What is here is for one that comes while it is still being imported.
"""

import sys


def main() -> None:
    """Runs the command line and leaves with its exit code."""
    try:
        from qtool.cli import main as program

        program()
    except KeyboardInterrupt:
        print("qtool: interrupted", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
