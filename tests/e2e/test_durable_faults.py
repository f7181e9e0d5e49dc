"""Saved KV that is not what it was, disks that refuse, requests that come to nothing: on the real engine."""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import subprocess
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from e2e.harness import serve
from e2e.test_correctness import ask as ask_tokens
from e2e.test_correctness import differs, likeliest
from e2e.test_durable import QUICK, ask, saved, sizes, state, text, tokens_of
from e2e.tiny_models import llama
from polykv_proxy.core.catalogue import Catalogue
from polykv_proxy.core.types import as_tokens
from polykv_proxy.durable import gguf, identity, offline, sidecar
from polykv_proxy.durable.store import Store

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from e2e.harness import Served


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory, smollm: Path) -> Path:
    """A model of thousands of tokens a second."""
    path = tmp_path_factory.mktemp("tiny") / "llama.gguf"
    llama(path, smollm)
    return path


def slots_of(served: Served) -> Path:
    """Where its engine saves."""
    return served.folder / "state" / "slots-0"


async def kept(served: Served, session: str, prompt: str) -> dict[str, Any]:
    """A conversation that has one turn behind it and is on disk; its entry."""
    await ask(served, session, prompt)

    async def there() -> bool:
        return session in await saved(served)

    await served.until(there)
    return (await saved(served))[session]


# -- identity ----------------------------------------------------------------------------------------------


async def test_two_hundred_mutations_and_no_wrong_restore(patched: Path, tiny: Path, tmp_path: Path) -> None:
    """DUR-1: one byte or one setting at a time, of a state that the real engine saved."""
    async with serve(tmp_path, *sizes(tiny), env=QUICK) as served:
        entry = await kept(served, "mine", text(1, 120))
        prompt, model_id = await tokens_of(served, text(1, 120)), entry["model_id"]
    folder, dice = tmp_path / "state" / "slots-0", random.Random(5)
    (right,) = Store(folder).scan().found
    assert Store(folder).check(right.state) is None
    read = offline.inspect(folder / right.state.file, all_tokens=True)  # from the file itself
    assert (read["n_tokens"], read["key"], read["right"]) == (entry["n_tokens"], "mine", True)
    assert read["tokens"][: len(prompt)] == prompt
    assert offline.folders(tmp_path / "state")[0].wrong() == []
    parts = identity.parts_of_model(
        gguf=[gguf.read(tiny).identity.plain()],
        projector=None,
        lora=[],
        reported={"type_k": "f16", "type_v": "f16"},
        arguments=[],
    )
    assert identity.model_id(parts) == model_id  # what is mutated below is what the proxy looked at
    tried = [0]

    def refused(change: Any) -> None:
        """Whoever starts on the changed folder has nothing, or does not use it."""
        tried[0] += 1
        copy = tmp_path / "copy"
        shutil.copytree(folder, copy)
        change(copy)
        store = Store(copy)
        for found in store.open().found:
            assert store.check(found.state) is not None
        shutil.rmtree(copy)

    slot_file, beside = right.state.file, next(folder.glob("*.json")).name
    size = (folder / slot_file).stat().st_size
    ends = 12 + 4 * (3 + len(right.state.tokens))
    for at in [*range(12), *dice.sample(range(12, ends), 40), *dice.sample(range(ends, size), 30)]:
        refused(lambda copy, at=at: _flip(copy / slot_file, at))
    for length in [0, 3, 11, 12, ends - 1, ends, *dice.sample(range(ends, size), 14), size - 1]:
        refused(lambda copy, length=length: _cut(copy / slot_file, length))
    document = json.loads((folder / beside).read_bytes())
    for name in document:
        refused(lambda copy, name=name: _without(copy / beside, name))
    for at in dice.sample(range((folder / beside).stat().st_size - 1), 40):
        refused(lambda copy, at=at: _flip(copy / beside, at))

    def unmatched(other: str) -> None:
        tried[0] += 1
        catalogue = Catalogue()
        catalogue.add(right.state, used_ts=0.0)
        assert catalogue.best(right.state.tokens, right.state.scope, right.state.model_id) is not None
        assert catalogue.best(right.state.tokens, right.state.scope, other) is None

    header = 200_000 if tiny.stat().st_size > 400_000 else 2_000
    raw, changed = tiny.read_bytes(), tmp_path / "changed.gguf"
    for at in dice.sample(range(min(header, 20_000)), 30):
        changed.write_bytes(raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :])
        try:
            other = gguf.read(changed).identity.plain()
        except (gguf.NotGgufError, ValueError):
            tried[0] += 1
            continue
        unmatched(identity.model_id(parts | {"gguf": [other]}))
    options = {
        "rope_scaling": "yarn",
        "rope_scale": 2.0,
        "rope_freq_base": 1.0,
        "yarn_ext_factor": 0.5,
        "flash_attn": "off",
        "swa_full": True,
        "override_kv": "x",
    }
    for name, value in options.items():
        unmatched(identity.model_id(parts | {"options": {name: value}}))
    for name, value in {
        "type_k": "q8_0",
        "type_v": "q8_0",
        "projector": {"size": 1},
        "lora": [[{"size": 1}, 1.0]],
        "state_version": 5,
    }.items():
        unmatched(identity.model_id(parts | {name: value}))
    assert tried[0] >= 200, tried
    # a sidecar that somebody else wrote rightly about a state of another content
    lie = replace(right.state, tokens=as_tokens([*right.state.tokens[:-1], 5]))
    (folder / beside).write_bytes(sidecar.write(lie, used_ts=0.0, uses=0))
    assert Store(folder).scan().found == []


def _flip(path: Path, at: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[at] ^= 0x10
    path.write_bytes(raw)


def _cut(path: Path, length: int) -> None:
    path.write_bytes(path.read_bytes()[:length])


def _without(path: Path, member: str) -> None:
    document = json.loads(path.read_bytes())
    del document[member]
    path.write_text(json.dumps(document))


async def test_another_model_or_setting_has_nothing_of_it(patched: Path, tiny: Path, tmp_path: Path) -> None:
    """DUR-2: and the old setting finds the old file again."""
    prompt = text(1, 120)
    other = tmp_path / "other.gguf"
    raw = tiny.read_bytes()
    assert raw.count(b"general.file_type") == 1  # says nothing to the engine
    other.write_bytes(raw.replace(b"general.file_type", b"general.fild_type"))
    async with serve(tmp_path, *sizes(tiny), env=QUICK) as served:
        await kept(served, "mine", prompt)
        past = len(await tokens_of(served, prompt))
    for model, more in (
        (other, ()),
        (tiny, ("--engine-arg", "--rope-freq-base", "--engine-arg", "20000")),
        (tiny, ("--engine-arg", "-ctk", "--engine-arg", "f32")),
    ):
        async with serve(tmp_path, *sizes(model), *more) as served:
            answer = await ask(served, "mine", f"{prompt} and on")
            assert answer["timings"]["cache_n"] == 0
            assert served.events("kv_restored") == []
    async with serve(tmp_path, *sizes(tiny)) as served:
        answer = await ask(served, "mine", f"{prompt} and on")
        assert answer["timings"]["cache_n"] >= past - 1


async def test_a_key_with_another_configuration_is_another_entry(
    patched: Path, tiny: Path, tmp_path: Path
) -> None:
    """DUR-8: the listing says which part changed; what is equal is still shared."""
    async with serve(tmp_path, *sizes(tiny, slots=1), env=QUICK) as served:
        system = {"role": "system", "content": text(1, 60)}

        async def chat(question: str, **more: Any) -> Any:
            messages = [system, {"role": "user", "content": question}]
            body = {"messages": messages, "max_tokens": 4, "ignore_eos": True, "session_id": "mine"}
            answer = await served.http.post("/v1/chat/completions", body | more)
            assert answer.status == 200, answer.body
            return answer.json

        async def entries(count: int) -> list[dict[str, Any]]:
            async def there() -> bool:
                return len((await served.http.get("/polykv/cache/mine")).json.get("entries", ())) == count

            await served.until(there)
            return (await served.http.get("/polykv/cache/mine")).json["entries"]

        await chat(text(2, 60))
        (first,) = await entries(1)
        assert first["config_changed"] == []
        await ask(served, "between", text(9, 40))
        await chat(text(2, 60) + " and what else?", chat_template_kwargs={"thinking": False})
        both = await entries(2)
        assert [entry["config_changed"] for entry in both] == [["kwargs"], ["kwargs"]]


# -- the disk ----------------------------------------------------------------------------------------------


@contextmanager
def mounted(folder: Path, size: str) -> Iterator[None]:
    """A small disk of its own."""
    folder.mkdir(parents=True)
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(folder)],
        check=False,
        capture_output=True,
        text=True,
    )
    if made.returncode:
        pytest.skip(f"a small disk cannot be mounted here: {made.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)


async def failures(served: Served) -> int:
    """Saves that failed, as the metrics say."""
    lines = (await served.http.get("/metrics")).body.decode().splitlines()
    (line,) = [each for each in lines if each.startswith('opencoti_polykv:kv_saves_total{outcome="failed"}')]
    return int(float(line.split()[-1]))


async def test_a_full_and_then_a_read_only_disk(patched: Path, tiny: Path, tmp_path: Path) -> None:
    """DUR-5: everybody is served, and the reason is there for whoever looks."""
    folder = tmp_path / "state" / "slots-0"
    env = QUICK | {"POLYKV_DURABLE__MIN_FREE_BYTES": "0"}
    with mounted(folder, "256k"):
        async with serve(tmp_path, *sizes(tiny), env=env) as served:
            assert (await state(served))["state"] == "on"
            for number in range(6):
                await ask(served, f"s{number}", text(number, 100))

            async def failed() -> bool:
                return await failures(served) > 0

            await served.until(failed)
            told = await state(served)
            assert told["state"] == "on"
            assert told["last_error"]
            assert served.events("kv_save_failed")

            async def tidy() -> bool:
                return not list(folder.glob("*.tmp"))

            await served.until(tidy)
            subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)
            before = await failures(served)
            for number in range(6):
                await ask(served, f"r{number}", text(20 + number, 100))

            async def failed_again() -> bool:
                return await failures(served) > before

            await served.until(failed_again)
            assert (await state(served))["last_error"]
            subprocess.run(["mount", "-o", "remount,rw", str(folder)], check=True)


async def test_too_little_disk_left(patched: Path, tiny: Path, tmp_path: Path) -> None:
    """DUR-5: nothing is written, and everybody is served."""
    env = QUICK | {"POLYKV_DURABLE__MIN_FREE_BYTES": str(1 << 60)}
    async with serve(tmp_path, *sizes(tiny, slots=1), env=env) as served:
        for number in range(3):
            await ask(served, f"s{number}", text(number, 60))
        assert "stay free" in (await state(served))["last_error"]
        assert await saved(served) == {}


async def test_files_that_are_deleted_or_damaged_meanwhile(patched: Path, tiny: Path, tmp_path: Path) -> None:
    """DUR-5: the conversation is computed again, and a tombstone says why."""
    async with serve(tmp_path, *sizes(tiny, slots=1), env=QUICK) as served:
        for seed, (session, harm) in enumerate(
            (("gone", Harm.delete), ("cut", Harm.cut), ("bent", Harm.bend)), 1
        ):
            prompt = text(seed, 120)
            entry = await kept(served, session, prompt)
            harm(slots_of(served) / entry["file"])
            await ask(served, "other", text(40, 60))
            answer = await ask(served, session, f"{prompt} and on")
            assert answer["timings"]["cache_n"] < 16
            gone = [(event["reason"], event["key"]) for event in served.events("saved_state_gone")]
            assert ("identity_changed", session) in gone
        shutil.rmtree(slots_of(served))
        for number in range(3):
            await ask(served, f"s{number}", text(50 + number, 60))
        assert (await state(served))["last_error"]


class Harm:
    """What happens to files."""

    @staticmethod
    def delete(file: Path) -> None:
        """Somebody tidied up."""
        file.unlink()

    @staticmethod
    def cut(file: Path) -> None:
        """The disk was full."""
        _cut(file, file.stat().st_size // 2)

    @staticmethod
    def bend(file: Path) -> None:
        """A bit of the KV."""
        _flip(file, file.stat().st_size - 100)


# -- what is worth keeping ---------------------------------------------------------------------------------


async def test_a_prefill_that_is_given_up_changes_nothing_on_disk(
    patched: Path, smollm: Path, tmp_path: Path
) -> None:
    """DUR-3: the state of the last whole answer stays."""
    async with serve(tmp_path, *sizes(smollm, slots=1, cells=8192, pools=2), env=QUICK) as served:
        prompt = text(1, 30)
        before = await kept(served, "mine", prompt)
        body = {"prompt": f"{prompt} {text(2, 900)}", "max_tokens": 4, "session_id": "mine", "stream": True}
        async with served.http.session() as session:
            asking = asyncio.create_task(session.post("/v1/completions", json=body).__aenter__())

            async def computing() -> bool:
                return (await served.counters())["slots"][0]["state"] == "prompt"

            await served.until(computing)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
        await served.quiet()
        await asyncio.sleep(2.5)  # idle for long enough to be saved, were it worth it
        after = (await saved(served))["mine"]
        assert (after["file"], after["n_tokens"]) == (before["file"], before["n_tokens"])


async def test_warm_and_cold_answers_agree_after_edits(patched: Path, tiny: Path, tmp_path: Path) -> None:
    """DUR-2: whatever of the history was changed before the next turn."""
    dice = random.Random(11)
    async with serve(tmp_path, *sizes(tiny, slots=1), env=QUICK) as served:
        history = await tokens_of(served, text(1, 90))
        for round_ in range(24):
            await ask_tokens(served, history, opencoti={"session_id": "mine", "auto_match": False})
            # another takes the slot
            await ask_tokens(served, history[::-1], opencoti={"session_id": "other", "auto_match": False})
            history = _edited(history, dice)
            restores = len(served.events("kv_restored"))
            warm = await ask_tokens(served, history, opencoti={"session_id": "mine", "auto_match": False})
            restored = served.events("kv_restored")[restores:]
            if restored:
                assert warm["timings"]["cache_n"] >= restored[0]["tokens"] - 1
            cold = await ask_tokens(served, history, cache_prompt=False, opencoti={"cache": False})
            assert cold["timings"]["prompt_n"] == len(history)
            assert not differs(likeliest(warm), likeliest(cold)), round_
        assert len(served.events("kv_restored")) >= 12
        partial = [event["tokens"] for event in served.events("kv_restored")]
        assert len(set(partial)) >= 6  # some end in the middle
        metrics = (await served.http.get("/metrics")).body
        assert b'kv_restores_total{outcome="ineffective"} 0.0' in metrics


def _edited(history: list[int], dice: random.Random) -> list[int]:
    at = dice.randrange(len(history) // 3, len(history))
    kind = dice.choice(["append", "replace", "delete", "insert", "truncate"])
    some = [dice.randrange(20, 900) for _ in range(dice.randrange(1, 12))]
    if kind == "append" or len(history) < 250:
        return [*history, *some]
    if kind == "replace":
        return [*history[:at], *some, *history[at + len(some) :]]
    if kind == "delete":
        return history[:at] + history[at + len(some) :]
    return [*history[:at], *some, *history[at:]] if kind == "insert" else history[: at + 1]
