"""Text to token ids and back, by the server's own routes or by a tokenizer.json, so that prompt lengths are exact."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from typing_extensions import override

from stepfloor.errors import UserError
from stepfloor.tools.bench.client import Client

_PROBE = "The quick brown fox"
# what a server without a known vocabulary is asked to tokenize, so that there are ids to draw from
_WORDS = (
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work number night point home water room mother area money "
    "story fact month lot right study book eye job word business issue side kind head house service friend father "
    "power hour game line end member law car city community name president team minute idea kid body information back "
    "parent face others level office door health person art war history party result change morning reason research "
    "girl guy moment air teacher force education for while return import class self none true false print value index"
)


class Tokens(Protocol):
    """What prompts need of a tokenizer. source says whose it is; ids are those that random prompts draw from."""

    source: str
    ids: tuple[int, ...]

    async def encode(self, text: str) -> list[int]:
        """Ids of a text, without tokens that a server adds."""
        ...

    async def decode(self, ids: Sequence[int]) -> str:
        """Text of ids."""
        ...

    async def count_chat(self, messages: Sequence[Mapping[str, str]]) -> int | None:
        """Tokens of the prompt that messages make, template included; None if that is not known here."""
        ...


class LocalTokens(Tokens):
    """A tokenizer.json on this disk."""

    def __init__(self, path: Path) -> None:
        from tokenizers import Tokenizer

        file = path / "tokenizer.json" if path.is_dir() else path
        try:
            self._tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises Exception itself
            raise UserError(f"{file} is no tokenizer.json ({error}); pass one, or the directory of one") from None
        self.source = f"file {file.name} of {file.parent.name}"
        special = self._tokenizer.get_added_tokens_decoder()
        self.ids = tuple(sorted(set(self._tokenizer.get_vocab(with_added_tokens=False).values()) - set(special)))

    @override
    async def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    @override
    async def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)

    @override
    async def count_chat(self, messages: Sequence[Mapping[str, str]]) -> int | None:
        return None  # the template is the server's


class ServerTokens(Tokens):
    """The server's /tokenize and /detokenize; vLLM's and SGLang's form, or llama.cpp's."""

    def __init__(self, client: Client, model: str, field: str) -> None:
        self.source = "the server's /tokenize"
        self.ids = ()
        self._client = client
        self._model = model
        self._field = field

    @classmethod
    async def find(cls, client: Client, model: str) -> "ServerTokens | None":
        """The routes of this server, if it has them and they agree with each other."""
        for field in ("prompt", "content"):
            tokens = cls(client, model, field)
            try:
                ids = await tokens.encode(_PROBE)
                if ids and (await tokens.decode(ids)).strip() == _PROBE:
                    tokens.ids = tuple(sorted(set(await tokens.encode(" " + _WORDS))))
                    return tokens
            except UserError:
                continue
        return None

    @override
    async def encode(self, text: str) -> list[int]:
        special = "add_special_tokens" if self._field == "prompt" else "add_special"
        answer = await self._post("/tokenize", {self._field: text, special: False})
        return list(answer.get("tokens") or ())

    @override
    async def decode(self, ids: Sequence[int]) -> str:
        answer = await self._post("/detokenize", {"tokens": list(ids)})
        return next((answer[name] for name in ("prompt", "content", "text") if isinstance(answer.get(name), str)), "")

    @override
    async def count_chat(self, messages: Sequence[Mapping[str, str]]) -> int | None:
        if self._field != "prompt":
            return None
        try:
            answer = await self._post("/tokenize", {"messages": list(messages), "add_generation_prompt": True})
        except UserError:
            return None
        return answer.get("count")

    async def _post(self, path: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        answer = await self._client.fetch_json("POST", path, {"model": self._model, **body})
        if not isinstance(answer, dict):
            raise UserError(f"{self._client.url}{path} does not answer; pass --tokenizer with a tokenizer.json")
        return answer


class PlainIds(Tokens):
    """Ids 0 to vocab_size - 1 and no text: enough for random ids on the completions route."""

    def __init__(self, vocab_size: int) -> None:
        self.source = f"ids below {vocab_size}"
        self.ids = tuple(range(vocab_size))

    @override
    async def encode(self, text: str) -> list[int]:
        raise UserError("--vocab-size makes random ids only; pass --tokenizer with a tokenizer.json for text")

    @override
    async def decode(self, ids: Sequence[int]) -> str:
        raise UserError("--vocab-size makes ids for the completions route only; pass --tokenizer for the chat route")

    @override
    async def count_chat(self, messages: Sequence[Mapping[str, str]]) -> int | None:
        return None
