"""``ChatPolyKV``: the proxy, or a plain llama-server, as a chat model of LangChain."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, ClassVar, Self

from langchain_core.language_models import BaseChatModel, LangSmithParams
from langchain_core.utils import from_env, secret_from_env
from pydantic import ConfigDict, Field, PrivateAttr, SecretStr

from polykv_proxy.client import AsyncPolyKVClient, Patience, PolyKVClient
from polykv_proxy.client.calls import CHAT, Call
from polykv_proxy.client.transport import DEFAULT_URL
from polykv_proxy.langgraph import structured
from polykv_proxy.langgraph.content_blocks import PROVIDER
from polykv_proxy.langgraph.errors import model_errors
from polykv_proxy.langgraph.messages import StreamedAnswer, to_openai, to_result
from polykv_proxy.langgraph.session_key import header_safe, session_key

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence

    from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
    from langchain_core.language_models import LanguageModelInput
    from langchain_core.messages import AIMessage, BaseMessage
    from langchain_core.outputs import ChatGenerationChunk, ChatResult
    from langchain_core.runnables import Runnable
    from langchain_core.tools import BaseTool

    from polykv_proxy.langgraph.structured import Method, Schema

AUTO = "auto"
"""``session_id`` that means: as LangGraph's thread, namespace and node tell."""


class ChatPolyKV(BaseChatModel):
    """A chat model behind the proxy; behind a plain llama-server too, then without what pools add.

    ::

        model = ChatPolyKV(base_url="http://127.0.0.1:8090", max_tokens=200)
        answer = model.bind(pool_id=pool.pool_id).invoke([system, question])
        answer.usage_metadata["input_token_details"]["cache_read"]  # tokens that were not computed
        answer.response_metadata["session_tps"]                     # tokens per second of this conversation

    What the proxy says about a request is in ``response_metadata``, under the names of its ``opencoti``
    block: ``pool_id``, ``session_id``, ``session_tps``, ``backpressure``, ``n_pool_shared``, ``ctx_used``,
    ``ctx_headroom_tokens``, and ``pool_unknown`` or ``context_full`` where they apply. Of a stream they are
    on the last chunk.

    Per call, by ``bind`` or keyword: ``pool_id``, ``session_id``, ``lease_id``, any member of a chat body.

    Errors are those of ``polykv_proxy.langgraph.errors``. A request that was refused (429, or the engine is
    loading) is sent again up to ``max_retries`` times after the time that the server names, at most
    ``max_retry_wait`` seconds in all. One that may have reached decode never is.
    """

    model_config = ConfigDict(populate_by_name=True, arbitrary_types_allowed=True, extra="forbid")

    model: str = Field(default="default", alias="model_name")
    """Chooses the engine where there are several."""
    base_url: str = Field(default_factory=from_env("POLYKV_BASE_URL", default=DEFAULT_URL))
    """With or without ``/v1``."""
    api_key: SecretStr | None = Field(default_factory=secret_from_env("POLYKV_API_KEY", default=None))
    """Pools belong to it: create them with the same key."""
    admin_key: SecretStr | None = Field(default_factory=secret_from_env("POLYKV_ADMIN_API_KEY", default=None))
    """For pools, headroom and whatever else is a control route, where the proxy demands one."""
    temperature: float | None = None
    max_tokens: int | None = None
    stop: list[str] | None = None
    seed: int | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    """Part of the prompt, so the pool must be made with the same."""
    model_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Further members of each chat body."""
    pool_id: str | None = None
    session_id: str | None = AUTO
    """Name of the conversation. ``auto``: by thread, sub-agent and worker; None: by its messages."""
    sort_tools: bool = False
    """Send tools in the order of their names, where they do not come in a stable one."""
    streaming: bool = False
    stream_usage: bool = True
    timeout: float | None = None
    """Seconds without a byte of an answer; None: for ever."""
    max_retries: int = 2
    max_retry_wait: float = 30.0
    extra_headers: dict[str, str] = Field(default_factory=dict)

    _client: PolyKVClient | None = PrivateAttr(default=None)
    _async_client: AsyncPolyKVClient | None = PrivateAttr(default=None)

    _sampling: ClassVar = ("temperature", "max_tokens", "stop", "seed", "top_k", "top_p", "min_p")

    # -- making one --------------------------------------------------------------------------------------

    @classmethod
    def from_server(cls, **fields: Any) -> Self:
        """A model that knows its window: asks the server, which the constructor does not."""
        model = cls(**fields)
        with model_errors():
            return model.with_props(model.client.props())

    @classmethod
    async def afrom_server(cls, **fields: Any) -> Self:
        """``from_server`` for asyncio."""
        model = cls(**fields)
        with model_errors():
            return model.with_props(await model.async_client.props())

    def with_props(self, props: Mapping[str, Any]) -> Self:
        """The same model with a profile, by the server's ``/props``; one that was given stays."""
        window = (props.get("default_generation_settings") or {}).get("n_ctx")
        if window and not self.profile:
            self.profile = {
                "max_input_tokens": int(window),
                "tool_calling": True,
                "structured_output": True,
            }
        return self

    @property
    def client(self) -> PolyKVClient:
        """The proxy's own routes, with this model's address and key."""
        if self._client is None:
            self._client = PolyKVClient(**self._client_options)
            weakref.finalize(self, self._client.close)
        return self._client

    @property
    def async_client(self) -> AsyncPolyKVClient:
        """The same for asyncio; its connections are those of the running loop."""
        if self._async_client is None:
            self._async_client = AsyncPolyKVClient(**self._client_options)
        return self._async_client

    @property
    def _client_options(self) -> dict[str, Any]:
        return {
            "base_url": self.base_url,
            "api_key": _plain(self.api_key),
            "admin_key": _plain(self.admin_key),
            "timeout_s": self.timeout,
            "patience": Patience(self.max_retries, self.max_retry_wait),
            "headers": self.extra_headers,
        }

    # -- what LangChain asks -----------------------------------------------------------------------------

    @property
    def _llm_type(self) -> str:
        return "polykv-chat"

    @property
    def _identifying_params(self) -> dict[str, Any]:
        given = {name: getattr(self, name) for name in self._sampling}
        return {"model": self.model, "base_url": self.base_url, **given, **self.model_kwargs}

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        params = super()._get_ls_params(stop=stop, **kwargs)
        params["ls_provider"] = PROVIDER  # equal to model_provider, or usage is not believed
        return params

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,  # noqa: ARG002 - LangChain's signature
        **kwargs: Any,
    ) -> ChatResult:
        body, forced = self.request(messages, stop, kwargs)
        with model_errors():
            document = self.client.send(_chat(body))
        return to_result(document, forced, session_name=_name(body))

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,  # noqa: ARG002 - LangChain's signature
        **kwargs: Any,
    ) -> ChatResult:
        body, forced = self.request(messages, stop, kwargs)
        with model_errors():
            document = await self.async_client.send(_chat(body))
        return to_result(document, forced, session_name=_name(body))

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        body, forced = self.request(messages, stop, kwargs, stream=True)
        answer = StreamedAnswer(forced, session_name=_name(body))
        with model_errors(), self.client.chat_stream(body) as documents:
            for document in documents:
                if (chunk := answer.feed(document)) is not None:
                    if run_manager is not None:
                        run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                    yield chunk
            yield answer.finish()

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        body, forced = self.request(messages, stop, kwargs, stream=True)
        answer = StreamedAnswer(forced, session_name=_name(body))
        with model_errors():
            async with self.async_client.chat_stream(body) as documents:
                async for document in documents:
                    if (chunk := answer.feed(document)) is not None:
                        if run_manager is not None:
                            await run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                        yield chunk
                yield answer.finish()

    def get_num_tokens_from_messages(
        self, messages: list[BaseMessage], tools: Sequence[Any] | None = None
    ) -> int:
        """Prompt tokens of these messages and tools, as the engine counts them."""
        body: dict[str, Any] = {"messages": to_openai(messages)}
        if tools:
            body["tools"] = structured.tool_definitions(tools, in_order=self.sort_tools)
        if self.chat_template_kwargs:
            body["chat_template_kwargs"] = self.chat_template_kwargs
        with model_errors():
            return self.client.count_tokens(body)

    # -- tools and structure -----------------------------------------------------------------------------

    def bind_tools(
        self,
        tools: Sequence[dict[str, Any] | type | Callable[..., Any] | BaseTool],
        *,
        tool_choice: Any = None,
        strict: bool | None = None,
        parallel_tool_calls: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, AIMessage]:
        """Tools for each call.

        Args:
            tools: in any form that LangChain knows.
            tool_choice: ``auto``, ``none``, ``any``/``required``/True, or a tool's name or OpenAI's object
                for it. A named tool is forced without changing the prompt.
            strict: as OpenAI's.
            parallel_tool_calls: whether one answer may call several.
            **kwargs: of each call, such as ``pool_id``.
        """
        definitions = structured.tool_definitions(tools, strict=strict, in_order=self.sort_tools)
        kwargs |= structured.tool_choice_members(tool_choice, definitions)
        if parallel_tool_calls is not None:
            kwargs["parallel_tool_calls"] = parallel_tool_calls
        return self.bind(tools=definitions, **kwargs)

    def with_structured_output(
        self,
        schema: Schema | None = None,
        *,
        method: Method = "json_schema",
        include_raw: bool = False,
        strict: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, Any]:
        """Answers in the form of a schema.

        Args:
            schema: a pydantic class, a TypedDict, or a JSON schema.
            method: ``json_schema`` and ``json_mode`` leave the prompt as it is, and so its pool;
                ``function_calling`` puts a tool into it.
            include_raw: answer with a dict of ``raw``, ``parsed`` and ``parsing_error``.
            strict: as OpenAI's.
            **kwargs: of each call, such as ``pool_id``.
        """
        traced: dict[str, Any] = {
            "ls_structured_output_format": {"kwargs": {"method": method}, "schema": schema or {}}
        }
        name = None
        if method == "function_calling":
            if schema is None:
                raise ValueError("function_calling needs a schema")
            (definition,) = structured.tool_definitions([schema], strict=strict)
            name = structured.tool_name(definition)
            answers = self.bind_tools([definition], tool_choice=name, **traced, **kwargs)
        elif method in ("json_schema", "json_mode"):
            members = structured.schema_members(schema, method, strict=strict)
            answers = self.bind(**members, **traced, **kwargs)
        else:
            raise ValueError(f"method {method!r} is none of json_schema, function_calling, json_mode")
        return structured.parsed(answers, structured.parser(schema, method, name), include_raw=include_raw)

    # -- the request -------------------------------------------------------------------------------------

    def request(
        self,
        messages: Sequence[BaseMessage],
        stop: list[str] | None,
        kwargs: Mapping[str, Any],
        *,
        stream: bool = False,
    ) -> tuple[dict[str, Any], str | None]:
        """The chat body, and the name of the tool that its answer is forced to call.

        Args:
            messages: of the conversation.
            stop: of this call; else the model's own.
            kwargs: of this call; what is not ours stands in the body as it is.
            stream: whether the answer is to be streamed.
        """
        given = dict(kwargs)
        forced = given.pop("forced_tool", None)
        usage = given.pop("stream_usage", self.stream_usage)
        for name in ("stream", "ls_structured_output_format"):
            given.pop(name, None)
        ours = {
            "pool_id": given.pop("pool_id", self.pool_id),
            "session_id": self._session(given.pop("session_id", self.session_id)),
            "lease_id": given.pop("lease_id", None),
        }
        own = {name: getattr(self, name) for name in (*self._sampling, "chat_template_kwargs")}
        own = {name: value for name, value in own.items() if value not in (None, [], {})}
        if stop:
            own["stop"] = stop
        if given.get("tools") == []:
            del given["tools"]
        body = {"model": self.model, "messages": to_openai(messages), **own, **self.model_kwargs, **given}
        if stream and usage:
            body["stream_options"] = {"include_usage": True}
        body["opencoti"] = {name: value for name, value in ours.items() if value is not None}
        return body, forced

    @staticmethod
    def _session(given: str | None) -> str | None:
        if given == AUTO:
            return session_key()
        return None if given is None else header_safe(given)


def _plain(key: SecretStr | None) -> str | None:
    return None if key is None else key.get_secret_value()


def _name(body: Mapping[str, Any]) -> str | None:
    name: str | None = body["opencoti"].get("session_id")
    return name


def _chat(body: dict[str, Any]) -> Call[dict[str, Any]]:
    return Call("POST", CHAT, dict, body, idempotent=False)


OpencotiChatModel = ChatPolyKV
"""The name of the original design."""
