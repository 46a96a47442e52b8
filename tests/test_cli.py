"""The command line as people mistype it: one sentence, an exit code, no traceback, and nothing lost."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from stepfloor import cli
from stepfloor.tools.bench.client import Client

SHIPPED = str(Path(cli.__file__).parents[1] / "shipped")
SERVER = "http://127.0.0.1:9"  # discard: nobody answers
NO_UTF8 = "\udcff"  # what Python makes of the byte 0xff


def failed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The one line that a command ends with. A traceback would be an exception here."""
    monkeypatch.setattr(sys, "argv", ["stepfloor", *words])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("stepfloor: ")
    assert said.count("\n") == 1
    return said


# what was typed -> words of the sentence
NUMBERS = [
    (("floor", SHIPPED, "--bandwidth", "nan"), "--bandwidth must be positive"),
    (("floor", SHIPPED, "--bandwidth", "inf"), "--bandwidth must be positive"),
    (("floor", SHIPPED, "--sequences", str(1 << 63)), "--sequences must be at most 65536"),
    (("floor", SHIPPED, "--sequences", "0"), "--sequences, --tensor-parallel-size and --bandwidth must be positive"),
    (("floor", SHIPPED, "--tensor-parallel-size", str(1 << 63)), "--tensor-parallel-size must be at most 1024"),
    (("floor", SHIPPED, "--collective-us", "nan"), "--collective-us must be at least 0"),
    (("floor", SHIPPED, "--collective-us=-1"), "--collective-us must be at least 0"),
    (("floor", SHIPPED, "--memory", "--max-num-seqs", "0"), "--max-num-seqs must be 1 to 65536"),
    (("floor", SHIPPED, "--memory", "--state-copies=-1"), "--state-copies must be at least 0"),
    (("floor", SHIPPED, "--memory", "--available-gib", "nan"), "--available-gib must be at least 0.001"),
    (("floor", SHIPPED, "--memory", "--available-gib", "inf"), "--available-gib must be at least 0.001"),
    (("floor", SHIPPED, "--memory", "--host-gib=-1"), "--host-gib must be at least 0"),
    (("serve", "--port", "65536"), "--port must be 0 to 65535"),
    (("serve", "--port=-1"), "--port must be 0 to 65535"),
    (("serve", "--max-num-seqs", str(1 << 63)), "--max-num-seqs must be at most 65536"),
    (("serve", "--request-deadline", "nan"), "--request-deadline must be at least 0"),
    (("serve", "--stall-timeout=-1"), "--stall-timeout must be at least 0"),
    (("serve", "--shutdown-timeout=-1"), "--shutdown-timeout must be at least 0"),
    (("bench", "serve", SERVER, "--duration", "nan"), "--duration must be more than 0"),
    (("bench", "serve", SERVER, "--duration", "inf"), "must be finite"),
    (("bench", "serve", SERVER, "--timeout", "nan"), "--timeout must be more than 0"),
    (("bench", "matrix", SERVER, "--seconds", "nan"), "--seconds must be more than 0"),
    (("bench", "accuracy", SERVER, "--max-tokens", "0"), "--max-tokens must be at least 1"),
    (("bench", "accuracy", SERVER, "--concurrency", "0"), "--concurrency must be at least 1"),
    (("bench", "step", "--prefill=-1"), "--prefill must be 0 to 1048576"),
    (("bench", "step", "--acceptance-length=-1"), "--acceptance-length must be at least 0"),
]
TEXTS = [
    (("inspect", ""), "MODEL is empty; pass a value"),
    (("floor", ""), "MODEL is empty; pass a value, or leave it out"),
    (("generate", "", "--prompt", "x"), "MODEL is empty"),
    (("generate", "--prompt", NO_UTF8), "--prompt wants text in UTF-8"),
    (("serve", ""), "MODEL is empty"),
    (("serve", "--model", ""), "--model is empty"),
    (("serve", "--api-key", ""), "--api-key is empty"),
    (("serve", "--uds", ""), "--uds is empty"),
    (("serve", "--acceptance", "both"), "--acceptance must be standard or coupled; got 'both'"),
    (("serve", "--kv-cache-dtype", "fp4"), "--kv-cache-dtype must be auto or fp8; got 'fp4'"),
    (("generate", "--prompt", "x", "--acceptance", ""), "--acceptance must be standard or coupled; got ''"),
    (("convert", "fp8-dense", "", "./x"), "SRC is empty"),
    (("convert", "fp8-dense", SHIPPED, ""), "DST is empty"),
    (("bench", "serve", SERVER, "--api-key", ""), "--api-key is empty"),
    (("floor", SHIPPED, "--acceptance", "high"), "--acceptance wants shares with commas between"),
    (("floor", SHIPPED, "--acceptance", "nan"), "shares lie between 0 and 1; got nan"),
    (("floor", SHIPPED, "--distinct-experts", "4"), "--distinct-experts wants TOKENS=EXPERTS"),
    (("bench", "step", SHIPPED, "--config", "c.json", "--device", "cpu"), "are two models; pass one"),
    (("bench", "step", SHIPPED, "--device", "tpu"), "--device must be cpu, cuda or cuda:N; got 'tpu'"),
    (("bench", "step", SHIPPED, "--device", "cuda:99"), "CUDA devices"),
]


@pytest.mark.parametrize(("words", "sentence"), NUMBERS + TEXTS)
def test_what_cannot_be_meant_is_one_sentence(
    words: tuple[str, ...], sentence: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sentence in failed(monkeypatch, capsys, *words)


WRITERS = [
    ("floor", "--plot"),
    ("bench", "accuracy", SERVER, "--output"),
    ("bench", "accuracy", SERVER, "--html"),
    ("bench", "serve", SERVER, "--output"),
    ("bench", "serve", SERVER, "--csv"),
    ("bench", "serve", SERVER, "--html"),
    ("bench", "matrix", SERVER, "--output"),
    ("bench", "import", "absent", "--output"),
    ("bench", "page", "absent", "--output"),
    ("bench", "ab", "absent", "--output"),
    ("bench", "compare", "absent", "absent", "--html"),
    ("bench", "step", "--output"),
]


@pytest.mark.parametrize("words", WRITERS)
def test_a_file_that_cannot_be_written_is_told_before_the_work(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An hour of measurement must not end in `Is a directory`."""
    (tmp_path / "file").write_text("kept", encoding="utf-8")
    assert "is a directory" in failed(monkeypatch, capsys, *words, str(tmp_path))
    assert "is no directory" in failed(monkeypatch, capsys, *words, str(tmp_path / "file" / "below"))
    assert (tmp_path / "file").read_text(encoding="utf-8") == "kept"


@pytest.mark.parametrize("words", [w for w in WRITERS if w[-1] == "--output" and w[1] != "page"])
def test_an_output_never_takes_the_place_of_a_device(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Results are renamed into place: as root, `--output /dev/null` would make a file of /dev/null. Here a pipe."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert "is a device or a pipe" in failed(monkeypatch, capsys, *words, str(pipe))
    assert pipe.is_fifo()


@pytest.mark.parametrize("url", ["", "ü☃", NO_UTF8, "http://h:99999", "http://h:x", "http://[::1"])
def test_a_url_that_is_none(url: str) -> None:
    with pytest.raises(cli.UserError, match="a server's URL looks like"):
        Client(url)


@pytest.mark.parametrize("value", ["Bearer ", "Bearer ü", "a\nb"])
def test_a_header_that_cannot_be_sent_is_not_quoted(value: str) -> None:
    """It may hold a key."""
    with pytest.raises(cli.UserError, match="authorization") as refused:
        Client(SERVER, {"authorization": value})
    assert value not in str(refused.value)


def run(words: str, env: dict[str, str], text: bytes = b"") -> "subprocess.CompletedProcess[bytes]":
    command = [sys.executable, "-m", "stepfloor", words]
    return subprocess.run(command, capture_output=True, check=False, timeout=60, env=env, input=text)


def test_standard_input_that_is_no_text() -> None:
    done = run("generate", {"PYTHONPATH": "src"}, b"\xff\xfe")
    assert done.returncode == 2
    assert done.stderr.startswith(b"stepfloor: standard input wants text in UTF-8")


def test_a_terminal_that_knows_ascii_alone() -> None:
    """Bars and boxes are escaped there; a UnicodeEncodeError would lose the report."""
    environment = {"PYTHONPATH": "src", "PYTHONIOENCODING": "ascii", "COLUMNS": "40", "NO_COLOR": "1"}
    done = run("floor", environment)
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"\x1b" not in done.stdout


def test_a_template_that_is_no_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    template = tmp_path / "template"
    template.write_bytes(b"\xff\xfe")
    said = failed(monkeypatch, capsys, "serve", "--port", "0", "--chat-template", str(template))
    assert "--chat-template wants a Jinja template in UTF-8" in said
