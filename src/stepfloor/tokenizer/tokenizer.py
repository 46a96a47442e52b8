"""Text to token ids and back, and messages to a prompt, from the files of a checkpoint.

Source: tokenizer.json is read by the `tokenizers` library; the byte alphabet is that of GPT-2's byte-level BPE;
chat templates render as transformers 5.24 does (utils/chat_template_utils.py): sandboxed, trimmed blocks, a
`tojson` that leaves HTML alone, `raise_exception` and `strftime_now`.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

from stepfloor.errors import UserError

Message = Mapping[str, Any]


class Tokenizer:
    """Immutable after load; made by `Tokenizer.load`."""

    def __init__(self, backend: Any, chat_template: str | None) -> None:
        self._backend = backend
        self._chat_template = chat_template
        added = backend.get_added_tokens_decoder()
        self._added = {token_id: str(token.content) for token_id, token in added.items()}
        self._special = frozenset(token_id for token_id, token in added.items() if token.special)
        self._vocab_size = max(backend.get_vocab(with_added_tokens=True).values()) + 1

    @classmethod
    def load(cls, directory: Path, chat_template: Path | None = None) -> "Tokenizer":
        """Read tokenizer.json and the chat template of a checkpoint directory.

        chat_template  a file to use in place of the directory's own
        Raises UserError if tokenizer.json is absent or broken, or the named template is absent. A directory
        without a template loads; only `apply_chat_template` refuses then.
        """
        from tokenizers import Tokenizer as Backend

        path = directory / "tokenizer.json"
        if not path.is_file():
            raise UserError(f"text needs tokenizer.json; {directory} has none; pass the prompt as ids with --token-ids")
        try:
            backend = Backend.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise UserError(f"{path} is not a tokenizer ({error}); download it again") from None
        return cls(backend, _read_template(directory, chat_template))

    @property
    def vocab_size(self) -> int:
        """Ids the tokenizer knows; a model may have more rows, which never stand for text."""
        return self._vocab_size

    def encode(self, text: str) -> list[int]:
        """Ids of text. Special tokens written out in it become their ids."""
        return self._backend.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int], skip_special: bool = False) -> str:
        """Text of ids; bytes that are not UTF-8 become U+FFFD."""
        kept = (i for i in ids if not (skip_special and i in self._special))
        return b"".join(self.token_bytes(i) for i in kept).decode("utf-8", errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The exact bytes one id stands for; a token may end inside a character. Empty for ids of no token."""
        if token_id in self._added:
            return self._added[token_id].encode()
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        alphabet = _byte_of_letter()
        return bytes(alphabet[letter] for letter in token)

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids of control tokens."""
        return self._special

    def is_special(self, token_id: int) -> bool:
        """Whether the id is a control token such as <|im_end|>. Tags that are part of the text are not."""
        return token_id in self._special

    def apply_chat_template(self, messages: Sequence[Message], **variables: Any) -> str:
        """The prompt that messages make. variables reach the template (tools, enable_thinking, ...).

        Raises UserError if the checkpoint has no template, the template refuses the messages, or a tool call's
        arguments are not a JSON object.
        """
        import jinja2

        if self._chat_template is None:
            raise UserError("this checkpoint has no chat template; pass --chat-template or send a plain prompt")
        try:
            template = _compile(self._chat_template)
            return template.render(messages=[_with_parsed_arguments(m) for m in messages], **variables)
        except jinja2.TemplateError as error:
            raise UserError(f"the chat template refused these messages: {error}") from None


def _read_template(directory: Path, override: Path | None) -> str | None:
    if override is not None:
        if not override.is_file():
            raise UserError(f"--chat-template names a file; {override} is none")
        try:
            return override.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"--chat-template wants a Jinja template in UTF-8; {override}: {error}") from None
    path = directory / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    config = directory / "tokenizer_config.json"
    template = json.loads(config.read_text(encoding="utf-8")).get("chat_template") if config.is_file() else None
    return template if isinstance(template, str) else None


@lru_cache(maxsize=1)
def _byte_of_letter() -> dict[str, int]:
    """GPT-2's alphabet: printable bytes stand for themselves, the other 68 for U+0100 and up, in order."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


@lru_cache(maxsize=4)
def _compile(source: str) -> Any:
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = _tojson
    return environment.from_string(source, {"raise_exception": _raise_exception, "strftime_now": _strftime_now})


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja's own filter escapes <, > and &, which a prompt must not
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    import jinja2

    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _with_parsed_arguments(message: Message) -> dict[str, Any]:
    """A message whose tool calls carry objects: clients send the arguments as JSON text, templates want a mapping."""
    calls = message.get("tool_calls")
    if not calls:
        return dict(message)
    parsed = []
    for call in calls:
        function = dict(call.get("function") or call)
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            try:
                function["arguments"] = json.loads(arguments) if arguments.strip() else {}
            except json.JSONDecodeError as error:
                raise UserError(f"arguments of the tool call {function.get('name')!r} are not JSON: {error}") from None
        if not isinstance(function.get("arguments") or {}, dict):
            raise UserError(f"arguments of the tool call {function.get('name')!r} must be a JSON object")
        parsed.append({**call, "function": function})
    return {**message, "tool_calls": parsed}
