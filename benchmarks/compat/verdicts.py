"""Why a test of others does not pass here, where that is no fault: on purpose, or not applicable.

A verdict belongs to a file, or to a test by the beginning of its name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.compat.vllm_suite import SuiteResult


@dataclass(frozen=True, slots=True)
class Verdict:
    """kind: "differs" (on purpose) or "not applicable"."""

    file: str
    name: str
    kind: str
    reason: str

    @property
    def is_of_passes(self) -> bool:
        """Whether it holds of a test that passes as well, which says nothing of our server."""
        return self.reason == OWN_CODE

    def is_about(self, result: SuiteResult) -> bool:
        return result.file.endswith(self.file) and result.name.startswith(self.name)


NOT_APPLICABLE, DIFFERS = "not applicable", "differs"
OTHER_MODEL = (
    "asks what the model says, or how a text is cut into tokens: so for the model it names"
)
IMAGES = "sends images; models here read text"
THINKS = "needs a model that reasons in tags"
HUB = "looks a model of the hub up in vLLM's own code, without a server"
ROOT = "asks for the hub id as the model's root, where the judged server was given a directory"
OWN_VERSION = "asks for vLLM's version"
USAGE = "usage always has prompt_tokens_details"
BAD_ADAPTERS = "an adapter that cannot be served is a 400 with every finding, in our words, no 500"
STRICT = "a string is no boolean, and a boolean is no number"
UNKNOWN = "unknown fields are refused, unless --ignore-unknown-fields"
BEAMS = "beam search is not offered"
CACHED_INPUT = (
    "input_tokens never counts cached tokens, as Anthropic's API has it; in vLLM's message_start "
    "it does, and what is written to the cache is counted as cache_creation_input_tokens"
)
NO_TOKENIZER = "a server without a tokenizer (--skip-tokenizer-init, --tokens-only) is not offered"
WORDS = "the error says the bound in words, without pydantic's names of errors"
REQUEST_ID = "every answer has X-Request-Id"
METRIC_N = (
    "vllm:request_params_n (_sum, _bucket, _count) is not measured: each choice is a request of "
    "its own here"
)
WATERMARK = "watermarks (--watermark-config) are not offered"
CALLS_ALONE = "the content of a message that only calls tools is null, as OpenAI has it"
CUT_CALL = "a call that max_tokens cuts off is told as far as it came, with finish_reason length"
RAW_MESSAGES = "enable_response_messages is refused by name"
OFFLINE = "compares with a model that sentence_transformers would have to download"
CACHED_USAGE = (
    "usage tells how many tokens of the prompt were cached, which differs between two calls"
)
FLOATS = "embeddings are float32, as numbers or base64, and are not padded"
TOO_LONG = "a text that is too long is refused by its place, its length and the limit, in our words"
TRUNCATION = (
    "a truncate_prompt_tokens above the context is refused with value and limit, in our words"
)
TOKEN_EMBEDDINGS = "/pooling gives embeddings of tokens beside those of texts, without a flag"
ONE_TASK = "--pooler-config.task is not offered: a request to /pooling names its task"
ORCA = "endpoint-load-metrics headers (ORCA) are not offered; /metrics and /load tell the load"
MASKS = "the tokens that could be drawn (--return-sampling-mask) are told by logprobs alone"
NAMED_SCORES = "prompt_logprob_token_ids is refused by name"
STOPS_ACT = "stop strings act whatever detokenize says"
ABORTS = "/abort_requests is there for admins, on every server"
SESSIONS = "SageMaker's stateful sessions are not offered"
OWN_CODE = "runs vLLM's own routes or scripts in the test's process, or in vLLM's server"
RUN_BATCH = "runs vLLM's own command run-batch"

_CHAT, _COMPLETION = "chat_completion/test_chat.py", "completion/test_completion.py"
_EMBEDS = "completion/test_completion_with_prompt_embeds.py"
_MESSAGES = "anthropic/test_messages.py"
_ECHO, _LORA = "test_chat_echo.py", "lora/test_lora_adapters.py"
_MIDDLEWARE = "test_optional_middleware.py"
_BATCH = "test_batched_chat_completions.py"
_BIAS, _REASONING = "test_chat_logit_bias_validation.py", "test_include_reasoning.py"
_RESPONSES, _TOOLS = "responses/test_simple.py", "test_completion_with_function_calling.py"
_METRICS = "instrumentator/test_metrics.py"
_ORCA = "instrumentator/test_orca_metrics.py"
_TOOL_CHATS = "tool_use/test_chat_completions.py"
_SCORES = "scoring/test_bi_encoder_online.py"
_EMBED, _TOKENS = "pooling/embed/test_online.py", "test_serving_tokens.py"
VERDICTS = tuple(
    Verdict(file, name, kind, reason)
    for file, name, kind, reason in (
        (_MESSAGES, "test_simple_messages", NOT_APPLICABLE, OTHER_MODEL),
        (_MESSAGES, "test_anthropic_tool_call", NOT_APPLICABLE, OTHER_MODEL),
        (_MESSAGES, "test_anthropic_streaming", DIFFERS, CACHED_INPUT),
        (_CHAT, "test_more_than_one_prompt_logprobs_chat", NOT_APPLICABLE, OTHER_MODEL),
        (_CHAT, "test_structured_outputs_choice_chat", NOT_APPLICABLE, OTHER_MODEL),
        (_CHAT, "test_response_format_json", NOT_APPLICABLE, OTHER_MODEL),
        (_CHAT, "test_complex_message_content", NOT_APPLICABLE, OTHER_MODEL),
        (_CHAT, "test_single_chat_session", DIFFERS, USAGE),
        (_CHAT, "test_extra_fields_allowed", DIFFERS, UNKNOWN),
        (_CHAT, "test_long_seed", DIFFERS, WORDS),
        (_ECHO, "test_chat_session_with_echo", NOT_APPLICABLE, OTHER_MODEL),
        (_ECHO, "test_top_logprobs", DIFFERS, STRICT),
        (_MIDDLEWARE, "test_no_request_id_header", DIFFERS, REQUEST_ID),
        (_BATCH, "test_batched_chat_completions_with_json", NOT_APPLICABLE, OTHER_MODEL),
        (_BATCH, "test_batched_harmony", NOT_APPLICABLE, HUB),
        (_BATCH, "test_batched_reasoning_wiring", NOT_APPLICABLE, HUB),
        (_BIAS, "test_chat_logit_bias_valid", NOT_APPLICABLE, HUB),
        (_BIAS, "test_chat_logit_bias_invalid", NOT_APPLICABLE, HUB),
        ("test_extra_content_fields.py", "", NOT_APPLICABLE, IMAGES),
        (_REASONING, "test_include_reasoning_true", NOT_APPLICABLE, THINKS),
        (_REASONING, "test_reasoning_tokens_in_usage", NOT_APPLICABLE, THINKS),
        (_REASONING, "test_default_includes_reasoning", NOT_APPLICABLE, THINKS),
        (_COMPLETION, "test_single_completion", NOT_APPLICABLE, OTHER_MODEL),
        (_COMPLETION, "test_completion_streaming", NOT_APPLICABLE, OTHER_MODEL),
        (_COMPLETION, "test_batch_completions", DIFFERS, BEAMS),
        (_EMBEDS, "test_completions_with", NOT_APPLICABLE, OTHER_MODEL),
        (_EMBEDS, "test_prompt_logprobs_raises", DIFFERS, STRICT),
        ("test_token_in_token_out.py", "", DIFFERS, NO_TOKENIZER),
        ("test_models.py", "test_check_models", NOT_APPLICABLE, ROOT),
        (
            "test_return_token_ids.py",
            "test_chat_completion_with_tool_use",
            NOT_APPLICABLE,
            OTHER_MODEL,
        ),
        ("test_return_token_ids.py", "test_comparison_with", NOT_APPLICABLE, OTHER_MODEL),
        ("instrumentator/test_basic.py", "test_show_version", NOT_APPLICABLE, OWN_VERSION),
        ("test_uds.py", "test_show_version", NOT_APPLICABLE, OWN_VERSION),
        (_LORA, "test_static_lora_lineage", NOT_APPLICABLE, ROOT),
        (_LORA, "test_load_lora_adapter_with_same_name", NOT_APPLICABLE, OTHER_MODEL),
        (_LORA, "test_dynamic_lora_invalid_files", DIFFERS, BAD_ADAPTERS),
        (_LORA, "test_dynamic_lora_badrequests", DIFFERS, BAD_ADAPTERS),
        (_LORA, "test_loading_invalid_adapters", DIFFERS, BAD_ADAPTERS),
        (
            "test_sagemaker_lora_adapters.py",
            "test_sagemaker_load_adapter_invalid",
            DIFFERS,
            BAD_ADAPTERS,
        ),
        (_METRICS, "test_metrics_exist[-multimodal]", NOT_APPLICABLE, IMAGES),
        (
            _METRICS,
            "test_metrics_exist[--enable-chunked-prefill-multimodal]",
            NOT_APPLICABLE,
            IMAGES,
        ),
        (_METRICS, "test_metrics_counts", NOT_APPLICABLE, IMAGES),
        (_METRICS, "test_metrics_exist_run_batch", NOT_APPLICABLE, RUN_BATCH),
        (_METRICS, "test_metrics_exist", DIFFERS, METRIC_N),
        (_TOOLS, "test_function_tool_use[watermarked", DIFFERS, WATERMARK),
        (_TOOLS, "test_function_tool_use[plain-True", NOT_APPLICABLE, THINKS),
        (_TOOLS, "test_function_tool_use[plain-False-auto", NOT_APPLICABLE, OTHER_MODEL),
        (_TOOLS, "test_named_tool_use", DIFFERS, CALLS_ALONE),
        (_TOOLS, "test_max_tokens_with_tool_choice_required[", DIFFERS, CUT_CALL),
        ("basic/test_truncation.py", "test_bigger_truncation_size", DIFFERS, TRUNCATION),
        (_EMBED, "test_basic", NOT_APPLICABLE, OTHER_MODEL),
        (_EMBED, "test_truncate_prompt_tokens", NOT_APPLICABLE, OTHER_MODEL),
        (_EMBED, "test_completion_request", NOT_APPLICABLE, OFFLINE),
        (_EMBED, "test_base64_embedding", NOT_APPLICABLE, OFFLINE),
        (_EMBED, "test_chat_request", DIFFERS, CACHED_USAGE),
        (_EMBED, "test_padding", DIFFERS, FLOATS),
        (_EMBED, "test_base64_embed_dtype", DIFFERS, FLOATS),
        (_EMBED, "test_bytes", DIFFERS, FLOATS),
        (_EMBED, "test_params_not_supported", DIFFERS, WORDS),
        (_EMBED, "test_pooling_embed", NOT_APPLICABLE, OTHER_MODEL),
        (_EMBED, "test_pooling_not_supported[token_embed", DIFFERS, TOKEN_EMBEDDINGS),
        (_SCORES, "test_score_api_max_model_len", DIFFERS, TOO_LONG),
        (_SCORES, "test_rerank_api_max_model_len", DIFFERS, TOO_LONG),
        (_SCORES, "test_score_api", NOT_APPLICABLE, OFFLINE),
        (_SCORES, "test_rerank_api", NOT_APPLICABLE, OTHER_MODEL),
        (_SCORES, "test_pooling_embed", NOT_APPLICABLE, OTHER_MODEL),
        ("token_embed/test_online.py", "test_pooling", DIFFERS, ONE_TASK),
        ("test_thinking_token_budget.py", "test_", NOT_APPLICABLE, THINKS),
        (_ORCA, "test_chat_completion_with_orca_header", DIFFERS, ORCA),
        (_ORCA, "test_completion_with_orca_header", DIFFERS, ORCA),
        (_ORCA, "test_single_completion", DIFFERS, USAGE),
        (_TOKENS, "test_generate_sampling_mask", DIFFERS, MASKS),
        (_TOKENS, "test_generate_prompt_token_id_logprobs", DIFFERS, NAMED_SCORES),
        (_TOKENS, "test_stop_string_workflow", DIFFERS, STOPS_ACT),
        (_TOKENS, "test_stop_strings_rejected_when_tokens_only", DIFFERS, NO_TOKENIZER),
        (_TOKENS, "test_text_mode_rejected_when_tokens_only", DIFFERS, NO_TOKENIZER),
        (_TOKENS, "test_render_then_generate_forwards", NOT_APPLICABLE, THINKS),
        (_TOKENS, "test_abort_requests_is_served_without", DIFFERS, ABORTS),
        ("test_sagemaker_stateful_sessions.py", "test_", DIFFERS, SESSIONS),
        ("test_sagemaker_handler_overrides.py", "test_customer", NOT_APPLICABLE, OWN_CODE),
        ("test_sagemaker_handler_overrides.py", "test_handler", NOT_APPLICABLE, OWN_CODE),
        ("test_sagemaker_handler_overrides.py", "test_env", NOT_APPLICABLE, OWN_CODE),
        ("test_sagemaker_middleware_integration.py", "test_", NOT_APPLICABLE, OWN_CODE),
        (_TOOL_CHATS, "test_response_format_with", NOT_APPLICABLE, OTHER_MODEL),
        (_TOOL_CHATS, "test_chat_completion_with_tools[mistral", NOT_APPLICABLE, OTHER_MODEL),
        (_TOOL_CHATS, "test_chat_completion_without_tools[mistral", NOT_APPLICABLE, OTHER_MODEL),
        ("tool_use/test_tool_calls.py", "test_", NOT_APPLICABLE, OTHER_MODEL),
        ("tool_use/test_parallel_tool_calls.py", "test_", NOT_APPLICABLE, OTHER_MODEL),
        (_RESPONSES, "test_basic", NOT_APPLICABLE, OTHER_MODEL),
        (_RESPONSES, "test_enable_response_messages", DIFFERS, RAW_MESSAGES),
        (_RESPONSES, "test_reasoning_item", NOT_APPLICABLE, THINKS),
        (_RESPONSES, "test_streaming_reasoning_tokens", NOT_APPLICABLE, THINKS),
        (_RESPONSES, "test_non_streaming_reasoning_tokens", NOT_APPLICABLE, THINKS),
    )
)


def verdict_of(result: SuiteResult, verdicts: Sequence[Verdict] = VERDICTS) -> Verdict | None:
    """The first verdict about a test, if it needs one."""
    found = next((verdict for verdict in verdicts if verdict.is_about(result)), None)
    needs_none = result.outcome == "passed" and not (found and found.is_of_passes)
    return None if needs_none else found
