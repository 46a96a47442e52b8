"""Flags of `vllm serve` that stepfloor reads and has one answer to, and those it refuses, each by its name.

Source: vLLM 0.33, engine/arg_utils.py and entrypoints/openai/cli_args.py, for the names.
"""

import difflib
from collections.abc import Sequence

from stepfloor.errors import UserError

# name -> (values that ask for what is done anyway, what to say to others); "" is the flag without a value
FIXED: dict[str, tuple[tuple[str, ...], str]] = {
    "--async-scheduling": (("", "true"), "the loop is always a step ahead of the ids it reads"),
    "--no-async-scheduling": ((), "the loop is always a step ahead of the ids it reads"),
    "--enable-chunked-prefill": (("", "true"), "prompts are always run in chunks"),
    "--no-enable-chunked-prefill": ((), "prompts are always run in chunks (--max-num-batched-tokens)"),
    "--enable-prefix-caching": ((), "there is no prefix cache yet"),
    "--no-enable-prefix-caching": (("",), ""),
    "--enable-auto-tool-choice": (("", "true"), "the model may always call the tools of a request"),
    "--tool-call-parser": (("qwen3_coder", "qwen3_xml"), "this model writes calls in one form, qwen3_coder"),
    "--reasoning-parser": (("qwen3",), "this model marks its reasoning in one way, qwen3"),
    "--enable-prompt-tokens-details": (("", "true"), "usage always has prompt_tokens_details"),
    "--enable-request-id-headers": (("", "true"), "every answer has x-request-id"),
    "--tensor-parallel-size": (("1",), "one GPU is served; launching several is not built yet"),
    "--pipeline-parallel-size": (("1",), "one GPU is served; launching several is not built yet"),
    "--data-parallel-size": (("1",), "one GPU is served; start one server for each"),
    "--decode-context-parallel-size": (("1",), "one GPU is served"),
    "--prefill-context-parallel-size": (("1",), "one GPU is served"),
    "--enable-expert-parallel": ((), "one GPU holds all experts"),
    "--api-server-count": (("1",), "one HTTP process serves one engine"),
    "--dtype": (("auto", "bfloat16"), "activations are what the checkpoint says"),
    "--quantization": ((), "formats are read from the checkpoint's headers; leave the flag out"),
    "--kv-cache-dtype": (("auto", "bfloat16"), "keys and values are kept in the model's dtype"),
    "--load-format": (("auto", "safetensors"), "weights are read from safetensors"),
    "--tokenizer-mode": (("auto",), "tokenizer.json is read"),
    "--trust-remote-code": (("", "true"), "no code of a checkpoint is ever run"),
    "--language-model-only": (("", "true"), "only text is served"),
    "--scheduling-policy": (("fcfs",), "first come, first served"),
    "--enforce-eager": (("", "true"), ""),
    "--mamba-ssm-cache-dtype": (("auto", "float32"), "recurrent state is float32"),
    "--mamba-cache-dtype": (("auto",), "convolution windows are kept in the model's dtype"),
    "--mamba-cache-mode": (("none",), "there is no prefix cache yet"),
    "--moe-backend": (("auto",), "each operator has one kernel a format"),
    "--linear-backend": (("auto",), "each operator has one kernel a format"),
    "--attention-backend": (("auto",), "each operator has one kernel a format"),
    "--stream-interval": (("1",), "every step's tokens are sent at once"),
    "--gpu-memory-utilization": ((), "the cache is sized by --max-num-seqs and --max-model-len"),
    "--kv-cache-memory-bytes": ((), "the cache is sized by --max-num-seqs and --max-model-len"),
    "--num-gpu-blocks-override": ((), "the cache is sized by --max-num-seqs and --max-model-len"),
    "--cpu-offload-gb": (("0",), "all weights lie on the device"),
    "--swap-space": (("0",), "a sequence keeps its pages until it ends"),
    "--kv-transfer-config": ((), "there is no transfer of the cache"),
    "--enable-lora": ((), "adapters are not served"),
    "--config": ((), "pass the flags themselves"),
    "--headless": ((), "there is one node"),
    "--nnodes": (("1",), "there is one node; launching several is not built yet"),
    "--response-role": (("assistant",), "answers are the assistant's"),
    "--logprobs-mode": (("raw_logprobs",), "log-probabilities are the model's own, before any setting"),
    "--guided-decoding-backend": (("auto", "xgrammar"), "grammars run in xgrammar"),
    "--chat-template-content-format": (("auto", "string"), "templates get text"),
    "--exclude-tools-when-tool-choice-none": (("", "true"), "tools that may not be called are not shown"),
}


def model_among(arguments: Sequence[str], known: Sequence[str]) -> str | None:
    """The one word among what the command line did not know, if there is one; known are the flags it does.

    Raises UserError for a flag that asks for something else than what is done, one that is none, and a second word.
    """
    waiting, model = list(arguments), None
    while waiting:
        argument = waiting.pop(0)
        name, equals, value = argument.partition("=")
        name = "--" + name[2:].replace("_", "-") if name.startswith("--") else name
        if not name.startswith("-"):
            if model is not None:
                raise UserError(f"one model is served; {argument!r} is one word too many beside {model!r}")
            model = argument
            continue
        if name not in FIXED:
            near = difflib.get_close_matches(name, [*known, *FIXED], 1)
            raise UserError(f"there is no flag {name}" + (f"; did you mean {near[0]}?" if near else ""))
        accepted, reason = FIXED[name]
        if not equals and waiting and not waiting[0].startswith("--") and set(accepted) != {""}:
            value = waiting.pop(0)
        if value.lower() not in accepted:
            given = f"{name} {value}".strip()
            only = ", ".join(v for v in accepted if v)
            remedy = f"leave it out or pass {name} {only}" if only else "leave it out"
            raise UserError(f"{given} is not supported: {reason or 'it has no value'}; {remedy}")
    return model
