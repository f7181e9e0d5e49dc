"""The launch profile: what an engine must be started with so that pools can work. Pure.

Users may add any llama-server argument except those that belong to us (an address, the slot count)
and, while pools are on, those under which shared cells cannot live. The tables below hold every such
option of the pinned tag with all its spellings; the reason ends up in the error message.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from polykv_proxy.errors import ConfigError
from polykv_proxy.settings import MAX_SEQUENCES

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

CPU_BATCH_TOKENS = 512
"""Tokens per batch on CPU hosts. A cancelled prefill is noticed between batches only, and stock's
2,048 tokens take a small CPU many seconds."""
CPU_PREFILL_CAP = 16
"""Prompt tokens that one step may add to those of the slots that generate, on CPU hosts. A step takes as
long as it has tokens; a GPU takes hardly longer for a full batch. Seen on a small CPU: beside a pool that
is computed, two slots keep a fifth of their speed and the pool takes 1.3 times as long; with 64 they keep
a twentieth, without a cap a hundredth."""

_OUR_ADDRESS = "the proxy chooses where its engine listens"
_ROUTER = "router mode runs several engines behind one port; the proxy needs one engine with one model"
_MODEL = "the model is chosen with engine.model (--model)"
_PRESET = "a preset chooses model and port; name a model with engine.model (--model)"
_EXITS = "it makes llama-server print something and exit"
_TLS = "the proxy speaks plain HTTP to an engine on this host"

_REFUSED: dict[tuple[str, ...], str] = {
    ("--host", "--port", "--reuse-port"): _OUR_ADDRESS,
    ("--api-prefix",): "the proxy addresses the engine's routes without a prefix",
    ("--ssl-key-file", "--ssl-cert-file"): _TLS,
    ("-np", "--parallel"): "the slot count is engine.parallel (--parallel)",
    ("-c", "--ctx-size"): "the context size is engine.ctx_size (--ctx-size)",
    ("--polykv-max-pools",): "the number of pools is engine.max_pools (--max-pools)",
    ("--polykv-prefill-cap",): "it is engine.prefill_cap",
    ("--slot-save-path",): "saved KV lives in the proxy's state folder",
    ("--no-slots",): "the proxy reads the engine's slots",
    ("-m", "--model", "-mu", "--model-url", "-dr", "--docker-repo"): _MODEL,
    ("-hf", "-hfr", "--hf-repo", "-hff", "--hf-file"): _MODEL,
    (
        "--models-dir",
        "--models-preset",
        "--models-max",
        "--models-autoload",
        "--no-models-autoload",
    ): _ROUTER,
    ("--embd-gemma-default", "--fim-qwen-1.5b-default", "--fim-qwen-3b-default"): _PRESET,
    ("--fim-qwen-7b-default", "--fim-qwen-7b-spec", "--fim-qwen-14b-spec"): _PRESET,
    ("--fim-qwen-30b-default", "--gpt-oss-20b-default", "--gpt-oss-120b-default"): _PRESET,
    ("--vision-gemma-4b-default", "--vision-gemma-12b-default"): _PRESET,
    ("-h", "--help", "--usage", "--version", "-cl", "--cache-list"): _EXITS,
    ("--completion-bash", "--list-devices"): _EXITS,
}
_REFUSED_WITH_POOLS: dict[tuple[str, ...], str] = {
    ("-no-kvu", "--no-kv-unified"): "pools share cells, which needs one KV buffer for all sequences",
    ("--cache-idle-slots",): "it clears idle slots, and their shared cells, whenever a request starts",
    ("--embedding", "--embeddings"): "an engine for embeddings only has no completions to share a prefix",
    ("--rerank", "--reranking"): "an engine for reranking only has no completions to share a prefix",
}
_WARNED_WITH_POOLS: dict[tuple[str, ...], str] = {
    ("--context-shift",): "sessions that share cells stop at the context limit instead of shifting",
    ("-bs", "--backend-sampling"): "every pool adds a sampler to the compute graph",
}
_GPU_OPTIONS = frozenset({"-ngl", "--gpu-layers", "--n-gpu-layers", "-dev", "--device"})
_NO_GPU_VALUES = frozenset({"0", "none"})
_BATCH_OPTIONS = frozenset({"-b", "--batch-size"})
_ALIAS_OPTIONS = frozenset({"-a", "--alias"})


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchProfile:
    """One engine's start, as decided by its owner."""

    model: Path
    """GGUF file."""
    socket: Path
    """Unix socket to listen on; llama-server knows one by the ending ``.sock``."""
    slot_dir: Path
    """Existing folder for saved KV."""
    parallel: int
    """Slots."""
    ctx_size: int
    """KV cells in tokens; 0 takes the model's training context."""
    max_pools: int
    """Prefix pools; with 0 the options of the patch are left out, so that a stock binary starts too."""
    prefill_cap: int | None = None
    """Prompt tokens a step while any slot generates; 0 is no cap, None ours on CPU hosts and none on GPUs."""
    extra: tuple[str, ...] = ()
    """Further arguments of the user, appended, so that the last word is theirs."""

    def argv(self) -> tuple[str, ...]:
        """Arguments after the binary.

        Raises:
            ConfigError: an argument or a size that cannot work; the message names it.
        """
        self._check()
        batch = () if self._batch_is_chosen() else ("-b", str(CPU_BATCH_TOKENS))
        return (
            *("--model", str(self.model), "--host", str(self.socket)),
            *("--kv-unified", "--parallel", str(self.parallel), "--ctx-size", str(self.ctx_size)),
            *self._pools(),
            *("--cache-ram", "0", "--no-cache-idle-slots", "--no-context-shift", "--cache-reuse", "0"),
            *("--slots", "--metrics", "--slot-save-path", str(self.slot_dir), "--sse-ping-interval", "10"),
            *batch,
            *self._alias(),
            *self.extra,
        )

    def warnings(self) -> tuple[str, ...]:
        """Arguments that work but cost something, each with what it costs."""
        if not self.max_pools:
            return ()
        found = []
        for option, value in _options(self.extra):
            for spellings, reason in _WARNED_WITH_POOLS.items():
                if option in spellings:
                    found.append(f"engine.args: {option}: {reason}")
            if option == "--cache-reuse" and value != "0":
                found.append(f"engine.args: {option}: sessions that share cells do not reuse chunks")
        return tuple(found)

    def _check(self) -> None:
        check(self.parallel, self.max_pools, self.extra)
        if self.socket.suffix != ".sock" or "," in str(self.socket):
            raise ConfigError(
                f"runtime_dir: the socket path {self.socket} must end in .sock and hold no comma"
            )

    def _pools(self) -> tuple[str, ...]:
        if not self.max_pools:
            return ()
        cap = self.prefill_cap
        if cap is None:
            cap = 0 if self._uses_gpu() else CPU_PREFILL_CAP
        return (
            *("--polykv-max-pools", str(self.max_pools)),
            *(("--polykv-prefill-cap", str(cap)) if cap else ()),
        )

    def _alias(self) -> tuple[str, ...]:
        """The file's name as the model's, which would be its whole path: where it lies is not for clients."""
        chosen = any(option in _ALIAS_OPTIONS for option, _ in _options(self.extra))
        # a comma would make it several names
        return () if chosen or "," in self.model.name else ("--alias", self.model.name)

    def _batch_is_chosen(self) -> bool:
        return self._uses_gpu() or any(option in _BATCH_OPTIONS for option, _ in _options(self.extra))

    def _uses_gpu(self) -> bool:
        return any(
            option in _GPU_OPTIONS and value not in _NO_GPU_VALUES for option, value in _options(self.extra)
        )


def check(parallel: int, max_pools: int, extra: Sequence[str]) -> None:
    """Refuse sizes and arguments that cannot work, before anything is fetched or built for them.

    Args:
        parallel: slots.
        max_pools: prefix pools.
        extra: arguments of the user.

    Raises:
        ConfigError: names what cannot work, and why.
    """
    if parallel + max_pools > MAX_SEQUENCES:
        raise ConfigError(
            f"engine.max_pools: {parallel} slots and {max_pools} pools need more than the "
            f"{MAX_SEQUENCES} sequence ids of one llama.cpp context"
        )
    for option, value in _options(extra):
        reason = _why_refused(option, value, pools=max_pools > 0)
        if reason:
            raise ConfigError(f"engine.args: {option} cannot be used: {reason}")


def child_environment(
    inherited: Mapping[str, str], added: Mapping[str, str], *, api_key: str | None
) -> dict[str, str]:
    """The engine's environment: ours, less llama-server's own switches, plus what the user adds.

    Every llama-server option can also be set by a ``LLAMA_ARG_`` variable. One that is left in a
    shell profile would change the engine behind the profile's back, so inherited ones are dropped.
    The API key travels here rather than in argv, which every local user can read.

    Raises:
        ConfigError: ``added`` sets an option by variable; ``engine.args`` is where it gets checked.
    """
    for name in added:
        if name.startswith("LLAMA_ARG_"):
            raise ConfigError(f"engine.env: {name} cannot be used: set the option in engine.args")
    kept = {name: value for name, value in inherited.items() if not name.startswith("LLAMA_ARG_")}
    kept |= added
    if api_key is not None:
        # several keys may be in force; ours must be one of them
        others = [key for key in kept.get("LLAMA_API_KEY", "").split(",") if key and key != api_key]
        kept["LLAMA_API_KEY"] = ",".join([api_key, *others])
    return kept


def _why_refused(option: str, value: str | None, *, pools: bool) -> str | None:
    for spellings, reason in _REFUSED.items():
        if option in spellings:
            return reason
    if not pools:
        return None
    for spellings, reason in _REFUSED_WITH_POOLS.items():
        if option in spellings:
            return reason
    if option in ("-cram", "--cache-ram") and value != "0":
        return "the RAM prompt cache moves idle slots out of the KV cache and copies shared cells back"
    if option == "--sleep-idle-seconds" and value != "-1":
        return "a sleeping engine drops its KV cache and every pool in it"
    return None


def _options(words: Sequence[str]) -> Iterator[tuple[str, str | None]]:
    """Each option with the word after it, spelled as llama-server reads it (``_`` counts as ``-``).

    Which options take a value is not known here; a value that looks like an option is read as one,
    which can only refuse too much.
    """
    for at, word in enumerate(words):
        if word.startswith("-") and not _is_number(word):
            option = word.replace("_", "-") if word.startswith("--") else word
            yield option, words[at + 1] if at + 1 < len(words) else None


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True
