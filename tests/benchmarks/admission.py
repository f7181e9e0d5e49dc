"""Admission: a simulated engine under a spawn ramp to twice what it can sustain, with the gate and without.

For each engine: no gate, additive increase with multiplicative decrease, a gradient limiter, the best static
limit found by search with hindsight on the same traces, and the gate. Then what the gate costs a request.

Refusals are judged by running the trace again with that session let in. "wrong": the floor would have been
kept in 99 % of the session-seconds of its stay. "clearly": with 2 % of the floor to spare. Where one session
more changes the rate by less than chance does, whoever keeps the floor refuses many wrongly in the first
sense: the static limits beside the best one show what each session more costs the floor, and what it saves.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

from polykv_proxy.core.gate import Entry, Gate
from polykv_proxy.core.policies import Mode, Policy
from tests.benchmarks.relay import machine
from tests.benchmarks.simulation import (
    PROFILES,
    Aimd,
    Gradient,
    Limiter,
    Load,
    OurGate,
    Outcome,
    Profile,
    Static,
    best_static,
    simulate,
    wrong_rejections,
)

LOADS = {
    "ramp": Load(),
    "agents": Load(turns=6, tokens=150, pause_s=6.0, last_s=400.0),
}
"""Single long answers, and sessions of six turns with pauses for tools between them."""


def shares(profile: Profile, load: Load, outcomes: dict[int, Outcome], judge: int) -> dict[str, object]:
    """One row: what came of all seeds."""
    total = sum(second.session_s for each in outcomes.values() for second in each.seconds)
    kept = sum(each.kept_share() * sum(s.session_s for s in each.seconds) for each in outcomes.values())
    row: dict[str, object] = {
        "kept_share": kept / total,
        "goodput_tokens": sum(each.goodput_tokens for each in outcomes.values()) / len(outcomes),
        "admitted": sum(len(each.admitted) for each in outcomes.values()),
        "refused": sum(len(each.refused) for each in outcomes.values()),
        "most_inside": max(each.most_inside for each in outcomes.values()),
    }
    if judge:
        judged = [wrong_rejections(profile, load, each, seed, judge) for seed, each in outcomes.items()]
        looked_at = sum(each.looked_at for each in judged)
        row |= {
            "judged": looked_at,
            "wrong_share": sum(each.wrong for each in judged) / looked_at if looked_at else None,
            "clearly_wrong_share": sum(each.clearly for each in judged) / looked_at if looked_at else None,
        }
    return row


def compare(profile: Profile, load: Load, seeds: range, judge: int) -> dict[str, object]:
    """All limiters on the same traces."""
    _, limit = best_static(profile, load, seeds)
    limiters = {
        "no gate": Limiter,
        "aimd": lambda: Aimd(profile.floor),
        "gradient": lambda: Gradient(profile.floor),
        f"static {limit}": lambda: Static(limit),
        "gate": lambda: OurGate(profile.floor),
    }
    rows = {}
    for name, limiter in limiters.items():
        outcomes = {seed: simulate(profile, load, limiter(), seed) for seed in seeds}
        judged = judge if name == "gate" or name.startswith("static") else 0
        rows[name] = shares(profile, load, outcomes, judged)
    return {
        "floor_tps": profile.floor,
        "sustainable": profile.sustainable,
        "best_static": limit,
        "rows": rows,
        "frontier": frontier(profile, load, seeds, judge, limit) if judge else {},
    }


def frontier(profile: Profile, load: Load, seeds: range, judge: int, best: int) -> dict[str, object]:
    """Static limits about the best one: what keeps the floor, and what refuses nobody wrongly."""
    step = max(1, profile.sustainable // 70)
    rows = {}
    for limit in range(max(1, best - 2 * step), best + 4 * step, step):
        outcomes = {seed: simulate(profile, load, Static(limit), seed) for seed in seeds}
        rows[f"static {limit}"] = shares(profile, load, outcomes, judge)
    return rows


def noise(profile: Profile, load: Load, seeds: range) -> list[dict[str, float]]:
    """The gate on the same engine with more and more noise."""
    found = []
    for level in (0.0, 0.01, 0.03, 0.1):
        noisy = Profile(**{**profile.__dict__, "noise": level})
        ours = shares(
            noisy, load, {seed: simulate(noisy, load, OurGate(noisy.floor), seed) for seed in seeds}, 0
        )
        best = best_static(noisy, load, seeds)[0]
        share = ours["goodput_tokens"] / best  # type: ignore[operator]
        found.append({"noise": level, "kept_share": ours["kept_share"], "of_best_static": share})  # type: ignore[dict-item]
    return found


def cost_us(policy: Policy, rounds: int = 20_000) -> float:
    """Microseconds that one request of a session that is inside takes, begin and end together."""
    gate = Gate()
    entry = Entry(session="s", policy=policy)  # type: ignore[arg-type]
    gate.on_request(entry, 0.0, jitter=0.5, scope="")  # type: ignore[arg-type]
    began = time.perf_counter()
    for number in range(rounds):
        now = number * 1e-6
        gate.on_request(entry, now, jitter=0.5, scope="")  # type: ignore[arg-type]
        gate.on_over("s", now)  # type: ignore[arg-type]
    return (time.perf_counter() - began) / rounds * 1e6


def newcomer_us(policy: Policy, rounds: int = 5000) -> float:
    """Microseconds that a session takes to come in and to be over."""
    gate = Gate()
    began = time.perf_counter()
    for number in range(rounds):
        name, now = f"s{number}", number * 1e-6
        gate.on_request(Entry(session=name, policy=policy), now, jitter=0.5, scope="")  # type: ignore[arg-type]
        gate.on_over(name, now)  # type: ignore[arg-type]
        gate.on_close(name, now)  # type: ignore[arg-type]
    return (time.perf_counter() - began) / rounds * 1e6


def percent(value: object) -> str:
    """A share for people."""
    return "" if value is None else f"{100 * float(value):.1f}"  # type: ignore[arg-type]


def table(name: str, found: dict) -> str:
    """One engine as text; goodput as a share of the best static limit's."""
    best = found["rows"][f"static {found['best_static']}"]["goodput_tokens"]
    heads = ("kept %", "goodput %", "admitted", "refused", "most", "wrong %", "clearly %")
    lines = [
        f"{name}: floor {found['floor_tps']:g} tps, {found['sustainable']} can have it",
        f"{'':12}" + "".join(f"{head:>11}" for head in heads),
    ]
    for limiter, row in [*found["rows"].items(), *found["frontier"].items()]:
        cells = [percent(row["kept_share"]), percent(row["goodput_tokens"] / best)]
        cells += [str(row[key]) for key in ("admitted", "refused", "most_inside")]
        cells += [percent(row.get(key)) for key in ("wrong_share", "clearly_wrong_share")]
        lines.append(f"{limiter:12}" + "".join(f"{cell:>11}" for cell in cells))
    return "\n".join(lines)


COLOURS = {
    "no gate": "#999",
    "aimd": "#d95f02",
    "gradient": "#7570b3",
    "static": "#1f78b4",
    "gate": "#1b9e77",
}


def plot(profile: Profile, load: Load, limit: int, seed: int) -> str:
    """What sessions experience over time, for each limiter, as SVG; the dashed line is the floor."""
    width, height, edge = 720, 320, 40
    top = 3.0 * profile.floor
    limiters = {
        "no gate": Limiter(),
        "aimd": Aimd(profile.floor),
        "gradient": Gradient(profile.floor),
        "static": Static(limit),
        "gate": OurGate(profile.floor),
    }

    def at(second: float, tps: float) -> str:
        x = edge + second / load.last_s * (width - 2 * edge)
        return f"{x:.1f},{height - edge - min(tps, top) / top * (height - 2 * edge):.1f}"

    left, right = at(0, profile.floor).split(","), at(load.last_s, profile.floor).split(",")
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="Arial">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<path d="M{left[0]},{left[1]}H{right[0]}" stroke="black" stroke-dasharray="4"/>',
        f'<text x="4" y="{left[1]}">{profile.floor:g}</text>',
        f'<text x="{edge}" y="16">{profile.name}: tokens/s of a session, over {load.last_s:g} s</text>',
    ]
    for number, (name, limiter) in enumerate(limiters.items()):
        seconds = simulate(profile, load, limiter, seed).seconds
        points = " ".join(at(second, each.tps) for second, each in enumerate(seconds) if each.tps is not None)
        parts.append(f'<polyline points="{points}" fill="none" stroke="{COLOURS[name]}" stroke-width="1.5"/>')
        parts.append(f'<text x="{edge + 110 * number}" y="{height - 8}" fill="{COLOURS[name]}">{name}</text>')
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    """Run all, print the tables, write results and plots."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--judge", type=int, default=25, help="refusals to look at again, each seed")
    parser.add_argument("--engines", type=int, default=len(PROFILES), help="the first so many of the engines")
    parser.add_argument("--out", type=Path, default=Path("bench-results/admission.json"))
    args = parser.parse_args()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    seeds = range(1, 1 + args.seeds)
    results: dict[str, object] = {"machine": machine()}
    for profile in PROFILES[: args.engines]:
        many = profile.sustainable > 100  # enough of them in one run
        for name, load in LOADS.items():
            chosen = seeds[:1] if many else seeds
            found = compare(profile, load, chosen, 0 if name == "agents" else args.judge)
            results[f"{profile.name}, {name}"] = found
            print(table(f"{profile.name}, {name}", found) + "\n", flush=True)
            if name == "ramp":
                picture = plot(profile, load, int(found["best_static"]), seeds[0])  # type: ignore[call-overload]
                file = f"admission-{profile.name.replace(' ', '-').replace(',', '')}.svg"
                args.out.with_name(file).write_text(picture)
    results["noise"] = noise(PROFILES[1], LOADS["ramp"], seeds[:2])
    for row in results["noise"]:  # type: ignore[attr-defined]
        print(
            f"{PROFILES[1].name}, noise {percent(row['noise'])} %: kept {percent(row['kept_share'])} %, "
            f"goodput {percent(row['of_best_static'])} % of the best static limit's"
        )
    enforced = Policy(target_tps_per_session=1.0, mode=Mode.ENFORCED)
    costs = {
        "turn_without_policy_us": cost_us(Policy()),
        "turn_enforced_us": cost_us(enforced),
        "newcomer_without_policy_us": newcomer_us(Policy()),
        "newcomer_enforced_us": newcomer_us(enforced),
    }
    results["costs"] = costs
    print("  ".join(f"{name} {value:.1f}" for name, value in costs.items()))
    args.out.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
