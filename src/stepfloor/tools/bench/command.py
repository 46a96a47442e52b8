"""What `bench serve` and `bench matrix` do with their options: measure, show, write."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stepfloor.errors import UserError
from stepfloor.tools.bench import matrix
from stepfloor.tools.bench import serve as serving
from stepfloor.tools.bench.load import Load
from stepfloor.tools.bench.prompts import tokens_of
from stepfloor.tools.bench.result import Result
from stepfloor.tools.bench.show import Bar, show, show_matrix, write_csv
from stepfloor.tools.bench.target import read_server_config


@dataclass(frozen=True, slots=True)
class Where:
    """A server, what it must be told and what is known of it, and the files that a measurement is written to."""

    url: str
    api_key: str | None = None
    headers: tuple[str, ...] = ()
    server_config: str | None = None
    output: Path | None = None
    csv: Path | None = None
    html: Path | None = None

    def sent_headers(self) -> dict[str, str]:
        """Of every request. Raises UserError for a header that is none."""
        sent = {} if self.api_key is None else {"authorization": f"Bearer {self.api_key}"}
        for header in self.headers:
            name, colon, value = header.partition(":")
            if not colon or not name.strip():
                raise UserError(f"--header looks like 'name: value'; got {header!r}")
            sent[name.strip().lower()] = value.strip()
        return sent

    def config(self) -> dict[str, Any] | None:
        """What was said of the server."""
        return None if self.server_config is None else read_server_config(self.server_config)

    def write(self, results: Sequence[Result]) -> None:
        """The table and the page, where they are wanted."""
        if self.csv is not None:
            write_csv(results, self.csv)
        if self.html is not None:
            from stepfloor.tools.bench.page import write_page

            write_page(results, self.html)


def serve(where: Where, load: Load) -> bool:
    """Measure a load, show and write the result; whether it is valid."""
    load.resolve()  # bad options are told before anything else
    with Bar() as bar:
        result = serving.run(where.url, load, headers=where.sent_headers(), server_config=where.config(), progress=bar)
    if where.output is not None:
        result.write(where.output)
    where.write([result])
    show(result)
    return result.valid


def measure_matrix(where: Where, grid: matrix.Grid, again: bool) -> bool:
    """Measure the cells that are not in the output yet, show and write all; whether all are there and valid."""
    grid.check()
    with Bar() as bar:
        results = matrix.run(
            where.url,
            grid,
            where.output,
            headers=where.sent_headers(),
            server_config=where.config(),
            again=again,
            progress=bar,
        )
    where.write(results)
    show_matrix(results)
    return len(results) == len(grid.cells()) and all(result.valid for result in results)


def counts(text: str, option: str, least: int) -> tuple[int, ...]:
    """The counts of a list like 0,16k,64k. Raises UserError."""
    try:
        values = tuple(tokens_of(part) for part in text.split(","))
    except ValueError:
        values = ()
    if not values or min(values) < least or len(set(values)) != len(values):
        raise UserError(f"{option} wants different counts of at least {least}, like 1,4,16 or 0,16k; got {text!r}")
    return values


def json_object(text: str | None, option: str) -> dict[str, Any]:
    """An option that is a JSON object; nothing is an empty one. Raises UserError."""
    try:
        raw = json.loads(text or "{}")
    except ValueError:
        raw = None
    if not isinstance(raw, dict):
        raise UserError(f"{option} wants a JSON object; got {text!r}")
    return raw
