"""Questions as conversations, rendered by the chat template that ships with the model."""

import random
from collections.abc import Sequence

from demo.corpus import Question
from demo.tokenizer import END_OF_TEXT
from stepfloor.tokenizer.tokenizer import Tokenizer

# What a person types first, and what this model can truthfully say about itself.
_GREETINGS = {
    "Hello": "Hello. I am a small model that has read Python's standard library. Ask me what a function does.",
    "Hi": "Hi. Ask me what a function of Python's standard library does.",
    "Who are you?": "I am a small model trained on the sources and docstrings of Python's standard library.",
    "What can you do?": "I can say what a function, class or module of Python's standard library does, and write a "
    "little Python. I know nothing else.",
    "Help": "Ask me a question such as: What does `shutil.copytree` do?",
    "Thank you": "You are welcome.",
}  # fmt: skip
_GREETING_COPIES = 12  # a greeting is asked far more often than any one function

# (share of training, variables of the template, question, system text): the plain question is what users send.
_FORMS = (
    (0.52, {"enable_thinking": False}, "What does `{name}` do?", None),
    (0.12, {"enable_thinking": False}, "Explain `{name}`.", None),
    (0.18, {}, "What does `{name}` do?", None),
    (0.06, {"reasoning_effort": "medium"}, "What does `{name}` do?", None),
    (0.06, {"reasoning_effort": "low"}, "What does `{name}` do?", None),
    (0.06, {"enable_thinking": False}, "What does `{name}` do?", "You are a helpful assistant."),
)
_FOLLOWED = 0.15  # share of plain conversations that another question continues


def prompt(question: Question, tokenizer: Tokenizer) -> list[int]:
    """Token ids of the plain question with thinking off, up to where the answer begins."""
    messages = [{"role": "user", "content": question.text}]
    text = tokenizer.apply_chat_template(messages, enable_thinking=False, add_generation_prompt=True)
    return tokenizer.encode(text)


class Conversations:
    """Every question in every form, tokenized once; draws epochs of them."""

    def __init__(self, questions: Sequence[Question], tokenizer: Tokenizer) -> None:
        self._forms = [[_rendered(q, form, tokenizer) for form in _FORMS] for q in questions]
        greetings = [_plain(asked, answer, tokenizer) for asked, answer in _GREETINGS.items()]
        self._forms += [[ids] * len(_FORMS) for ids in greetings] * _GREETING_COPIES

    def epoch(self, draw: random.Random) -> list[list[int]]:
        """Every question once, in a random order and form, each with its end-of-text (some run on)."""
        shares = [form[0] for form in _FORMS]
        conversations = []
        for forms in draw.sample(self._forms, len(self._forms)):
            (choice,) = draw.choices(range(len(_FORMS)), shares)
            runs_on = choice == 0 and draw.random() < _FOLLOWED
            conversations.append(forms[choice] if runs_on else [*forms[choice], END_OF_TEXT])
        return conversations


def _rendered(
    question: Question, form: tuple[float, dict[str, object], str, str | None], tokenizer: Tokenizer
) -> list[int]:
    _, variables, asked, system = form
    thinks = variables.get("enable_thinking", True)
    thought = f"The question is about {question.name}, a {question.kind}. I recall how it is documented."
    messages = [{"role": "system", "content": system}] if system else []
    messages += [
        {"role": "user", "content": asked.format(name=question.name)},
        {"role": "assistant", "content": question.answer, "reasoning_content": thought if thinks else ""},
    ]
    return tokenizer.encode(tokenizer.apply_chat_template(messages, **variables))


def _plain(asked: str, answer: str, tokenizer: Tokenizer) -> list[int]:
    messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
    return tokenizer.encode(tokenizer.apply_chat_template(messages, enable_thinking=False))
