"""`python -m hfjax demo`: what the command line can do."""

import argparse
import sys

from hfjax import demo, timetable


def main() -> int:
    """Run the command given; return its exit status."""
    parser = argparse.ArgumentParser(prog="hfjax", description="Parallel training for JAX.")
    commands = parser.add_subparsers(required=True, metavar="command")
    shown = commands.add_parser("demo", help="train a GPT on 8 fake CPU devices, every strategy")
    shown.set_defaults(run=lambda _: demo.main())
    shown = commands.add_parser("schedule", help="show a pipeline schedule and what it costs")
    timetable.arguments(shown)
    shown.set_defaults(run=timetable.main)
    given = parser.parse_args()
    try:
        return given.run(given)
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
