"""The command line: one subcommand per tool; `environment` is the only reader of the environment."""

import errno
import io
import sys

import typer

from stepfloor.cli import bench, convert, floor, run
from stepfloor.errors import UserError

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)

INTERRUPTED = 130  # what typer exits with after Ctrl-C: 128 and the signal


@app.callback()
def stepfloor() -> None:
    """Serve Qwen3.8-Flash-Next close to the memory-bandwidth floor, and say how close."""


app.command()(floor.inspect)
app.command()(floor.floor)
app.command()(run.generate)
# flags of vllm serve that are no options here are read by their names
app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(run.serve)
app.add_typer(convert.app, name="convert")
app.add_typer(bench.app, name="bench")


def main() -> None:
    """Entry point: what the user can mend is one line on standard error and an exit code."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # a bar on a terminal that knows ASCII alone, a path that is no UTF-8: escaped, not a traceback
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        app()
    except SystemExit as end:
        if end.code == INTERRUPTED:
            print("stepfloor: interrupted; results written until now are kept", file=sys.stderr)
        raise
    except UserError as error:
        print(f"stepfloor: {error}", file=sys.stderr)
        raise SystemExit(error.exit_code) from None
    except OSError as error:
        # a file that is gone, no right to it, a full disk
        what = "" if error.filename is None else f"{error.filename} cannot be used: "
        hint = "; free some space" if error.errno == errno.ENOSPC else "; pass another path" if what else ""
        print(f"stepfloor: {what}{error.strerror or error}{hint}", file=sys.stderr)
        raise SystemExit(UserError.exit_code) from None
