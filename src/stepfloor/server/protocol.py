"""What clients may send. Names, ranges and defaults are OpenAI's, and vLLM's where OpenAI has none.

A field that no model names is accepted and ignored, as every server does that agents live on; one that asks for
something stepfloor does not do is refused by name (`UNSUPPORTED`), because its answer would not be what was asked for.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from stepfloor.errors import UserError

INT64 = 2**63 - 1
MAX_N = 128

UNSUPPORTED = {
    "best_of": "one candidate is drawn for each of the n answers",
    "use_beam_search": "there is no beam search",
    "prompt_logprobs": "the prompt's logits are not kept",
    "allowed_token_ids": "use a grammar",
    "bad_words": "use logit_bias",
    "logits_processors": "no code runs in the step",
    "truncate_prompt_tokens": "no prompt token is ever dropped",
    "previous_response_id": "responses are not stored; send the conversation",
    "conversation": "responses are not stored; send the conversation",
    "background": "responses are not stored",
    "prompt_cache_salt": "there is no prefix cache yet",
    "kv_transfer_params": "there is no transfer of the cache",
    "continue_final_message": "the last message is always closed",
    "suffix": "the model was not trained to fill in the middle",
}

Probability = Annotated[float, Field(ge=0, le=1)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
TokenId = Annotated[int, Field(ge=0, le=INT64)]


class Body(BaseModel):
    """Base of every request body."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False)

    @model_validator(mode="after")
    def _refuse_unsupported(self) -> "Body":
        for name, reason in UNSUPPORTED.items():
            value = (self.__pydantic_extra__ or {}).get(name)
            # null, false, nothing, and one candidate of one ask for nothing
            if value and not (name == "best_of" and value == 1):
                raise UserError(f"{name} is not supported: {reason}; leave it out")
        return self


class StreamOptions(BaseModel):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class StructuredOutputs(BaseModel):
    """vLLM's constraints; one of them may be given."""

    json_schema: dict[str, Any] | str | bool | None = Field(None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | dict[str, Any] | None = None


class JsonSchemaFormat(BaseModel):
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | bool | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(BaseModel):
    model_config = ConfigDict(extra="allow")

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchemaFormat | None = None


class Sampling(Body):
    """Fields that completions, chat completions and responses share."""

    model: str | None = None
    temperature: Annotated[float, Field(ge=0)] | None = None
    top_p: Probability | None = None
    top_k: Annotated[int, Field(ge=-1, le=INT64)] | None = None
    min_p: Probability | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Field(gt=0)] | None = None
    seed: Annotated[int, Field(ge=-INT64, le=INT64)] | None = None
    logit_bias: dict[str, float] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[TokenId] | None = None
    min_tokens: Annotated[int, Field(ge=0, le=INT64)] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    return_token_ids: bool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    deadline_s: Annotated[float, Field(gt=0)] | None = None


class CompletionRequest(Sampling):
    """POST /v1/completions."""

    prompt: str | list[str] | list[TokenId] | list[list[TokenId]]
    max_tokens: Annotated[int, Field(ge=1, le=INT64)] | None = 16
    n: Annotated[int, Field(ge=1, le=MAX_N)] | None = 1
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    logprobs: Annotated[int, Field(ge=0)] | None = None
    echo: bool | None = False
    add_special_tokens: bool | None = None


class FunctionCall(BaseModel):
    model_config = ConfigDict(extra="allow")

    name: str
    arguments: str | dict[str, Any] | None = None


class ToolCall(BaseModel):
    model_config = ConfigDict(extra="allow")

    id: str | None = None
    type: str | None = None
    function: FunctionCall


class ContentPart(BaseModel):
    model_config = ConfigDict(extra="allow")

    type: str
    text: str | None = None


class ChatMessage(BaseModel):
    model_config = ConfigDict(extra="allow")

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[ContentPart | str] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    name: str | None = None


class FunctionDefinition(BaseModel):
    model_config = ConfigDict(extra="allow")

    name: Annotated[str, Field(min_length=1, pattern=r"^[^<>\s]+$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(BaseModel):
    model_config = ConfigDict(extra="allow")

    type: Literal["function"] = "function"
    function: FunctionDefinition


class NamedFunction(BaseModel):
    name: str


class NamedToolChoice(BaseModel):
    type: Literal["function"] = "function"
    function: NamedFunction


class ChatRequest(Sampling):
    """POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_tokens: Annotated[int, Field(ge=1, le=INT64)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, le=INT64)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_N)] | None = 1
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    logprobs: bool | None = False
    top_logprobs: Annotated[int, Field(ge=0)] | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = None
    parallel_tool_calls: bool | None = True
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    chat_template: str | None = None
    include_reasoning: bool | None = True
    add_generation_prompt: bool | None = True


class ReasoningOptions(BaseModel):
    model_config = ConfigDict(extra="allow")

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None


class TextFormat(BaseModel):
    model_config = ConfigDict(extra="allow")

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema_: dict[str, Any] | bool | None = Field(None, alias="schema")


class TextOptions(BaseModel):
    model_config = ConfigDict(extra="allow")

    format: TextFormat | None = None


class ResponsesTool(BaseModel):
    model_config = ConfigDict(extra="allow")

    type: str
    name: Annotated[str, Field(min_length=1, pattern=r"^[^<>\s]+$")] | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None


class ResponsesToolChoice(BaseModel):
    type: Literal["function"]
    name: str


class ResponsesRequest(Sampling):
    """POST /v1/responses."""

    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1, le=INT64)] | None = None
    stream: bool | None = False
    tools: list[ResponsesTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ResponsesToolChoice | None = None
    parallel_tool_calls: bool | None = True
    reasoning: ReasoningOptions | None = None
    text: TextOptions | None = None
    metadata: dict[str, Any] | None = None
    top_logprobs: Annotated[int, Field(ge=0)] | None = None
    include: list[str] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class AnthropicTool(BaseModel):
    model_config = ConfigDict(extra="allow")

    name: Annotated[str, Field(min_length=1, pattern=r"^[^<>\s]+$")]
    description: str | None = None
    input_schema: dict[str, Any] | None = None


class AnthropicToolChoice(BaseModel):
    model_config = ConfigDict(extra="allow")

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class AnthropicMessage(BaseModel):
    role: Literal["user", "assistant", "system"]
    content: str | list[dict[str, Any]]


class AnthropicThinking(BaseModel):
    model_config = ConfigDict(extra="allow")

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None


class CountTokensRequest(Body):
    """POST /v1/messages/count_tokens."""

    model: str | None = None
    messages: Annotated[list[AnthropicMessage], Field(min_length=1)]
    system: str | list[dict[str, Any]] | None = None
    tools: list[AnthropicTool] | None = None
    tool_choice: AnthropicToolChoice | None = None
    thinking: AnthropicThinking | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class MessagesRequest(CountTokensRequest):
    """POST /v1/messages."""

    max_tokens: Annotated[int, Field(ge=1, le=INT64)]
    stop_sequences: list[str] | None = None
    stream: bool | None = False
    temperature: Annotated[float, Field(ge=0)] | None = None
    top_p: Probability | None = None
    top_k: Annotated[int, Field(ge=-1, le=INT64)] | None = None
    seed: Annotated[int, Field(ge=-INT64, le=INT64)] | None = None
    deadline_s: Annotated[float, Field(gt=0)] | None = None


class TokenizeRequest(Body):
    """POST /tokenize: a prompt, or messages that the chat template turns into one."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    tools: list[Tool] | None = None
    add_generation_prompt: bool | None = True
    return_token_strs: bool | None = False
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeRequest(Body):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[TokenId]
