"""The command line: one subcommand per tool, and the only reader of the environment."""

import sys

import typer

from stepfloor.errors import UserError

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


@app.callback()
def stepfloor() -> None:
    """Serve Qwen3.8-Flash-Next close to the memory-bandwidth floor, and say how close."""


def main() -> None:
    """Entry point: a UserError is one line on standard error and its exit code."""
    try:
        app()
    except UserError as error:
        print(f"stepfloor: {error}", file=sys.stderr)
        raise SystemExit(error.exit_code) from None
