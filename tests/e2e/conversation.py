"""A fixed set of requests over every API family, errors included: greedy, one at a time."""

from __future__ import annotations

from typing import Any

USER = [{"role": "user", "content": "Name three colours."}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "lookup",
            "parameters": {"type": "object", "properties": {"q": {"type": "string"}}},
        },
    }
]


def greedy(**body: Any) -> dict[str, Any]:
    """A request whose answer is determined."""
    return {"temperature": 0, "seed": 7, **body}


REQUESTS: list[tuple[str, str, Any]] = [
    ("GET", "/health", None),
    ("GET", "/v1/models", None),
    ("POST", "/tokenize", {"content": "Hello wörld", "with_pieces": True}),
    ("POST", "/detokenize", {"tokens": [19556, 905]}),
    ("POST", "/apply-template", {"messages": USER}),
    ("POST", "/v1/chat/completions", greedy(messages=USER, max_tokens=8)),
    ("POST", "/v1/chat/completions", greedy(messages=USER, max_tokens=8, stream=True)),
    (
        "POST",
        "/v1/chat/completions",
        greedy(messages=USER, max_tokens=8, stream=True, stream_options={"include_usage": True}),
    ),
    ("POST", "/v1/chat/completions", greedy(messages=USER, max_tokens=4, logprobs=True, top_logprobs=3)),
    (
        "POST",
        "/v1/chat/completions",
        greedy(messages=USER, max_tokens=24, tools=TOOLS, tool_choice="required"),
    ),
    (
        "POST",
        "/v1/chat/completions",
        greedy(
            messages=USER,
            max_tokens=24,
            response_format={"type": "json_schema", "json_schema": {"schema": SCHEMA}},
        ),
    ),
    ("POST", "/v1/completions", greedy(prompt="The sea is", max_tokens=6)),
    ("POST", "/v1/completions", greedy(prompt="The sea is", max_tokens=6, stream=True)),
    ("POST", "/completion", greedy(prompt="The sky is", n_predict=6)),
    ("POST", "/completion", greedy(prompt="The sky is", n_predict=6, stream=True, return_progress=True)),
    ("POST", "/completion", greedy(prompt="The sky is", n_predict=3, n_probs=2, return_tokens=True)),
    ("POST", "/v1/messages", greedy(messages=USER, max_tokens=6)),
    ("POST", "/v1/messages", greedy(messages=USER, max_tokens=6, stream=True)),
    ("POST", "/v1/messages/count_tokens", {"messages": USER, "max_tokens": 6}),
    ("POST", "/v1/responses", greedy(input="Say hi", max_output_tokens=6)),
    ("POST", "/v1/responses", greedy(input="Say hi", max_output_tokens=6, stream=True)),
    ("POST", "/v1/responses/input_tokens", {"input": "Say hi"}),
    ("POST", "/v1/chat/completions/input_tokens", {"messages": USER}),
    ("POST", "/v1/chat/completions/input_tokens?tokens=1&text=1", {"messages": USER}),
    ("POST", "/v1/chat/completions/input_tokens?tokens=1", {"prompt": [1, "x"]}),
    ("POST", "/infill", greedy(input_prefix="a", input_suffix="b", n_predict=3)),
    ("POST", "/v1/embeddings", {"input": "x"}),
    ("POST", "/v1/rerank", {"query": "x", "documents": ["y"]}),
    ("POST", "/v1/chat/completions", b"{not json"),
    ("POST", "/v1/chat/completions", {"messages": "wrong"}),
    ("POST", "/v1/messages", b"[]"),
    ("POST", "/completion", {"n_predict": 3}),
    ("POST", "/completion", greedy(prompt="word " * 3000, n_predict=3)),
    ("POST", "/completion", greedy(prompt="x", n_predict=3, grammar="root ::= broken (")),
    ("GET", "/nowhere", None),
    ("GET", "/lora-adapters", None),
    ("GET", "/slots", None),
    ("POST", "/slots/0?action=erase", {}),
    ("GET", "/v1/stream?conv_id=none", None),
    ("GET", "/tools", None),
    ("GET", "/cors-proxy", None),
    ("OPTIONS", "/v1/chat/completions", None),
]
