"""One page per generation: every round's drafted tokens, what became of them, and what the round cost.

Self-contained HTML without scripts or outside resources: it opens from a mail attachment. Colour is never alone:
rejected tokens are struck through, corrections and bonus tokens are underlined, each in its own way.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from itertools import chain

from selfspec.errors import UserError
from selfspec.records import TraceRecord, TraceRound, TraceToken

KINDS = {
    "accepted": "drafted and accepted",
    "rejected": "drafted and rejected",
    "correction": "the target's own token after a rejection",
    "bonus": "the target's extra token after full acceptance",
}
PHASES = ("draft", "verify", "other")
VISIBLE = str.maketrans({"\n": "⏎", "\t": "⇥", "\r": "␍"})

STYLE = """
:root { color-scheme: light dark; --ink: #1b1b1b; --paper: #fff; --faint: #767676; --line: #ddd;
  --accepted: #d6efd8; --rejected: #f6d5d5; --correction: #fde7b5; --bonus: #cfe3fb;
  --draft: #8a8a8a; --verify: #333; --other: #ccc; }
@media (prefers-color-scheme: dark) { :root { --ink: #e8e8e8; --paper: #161616; --faint: #9a9a9a; --line: #3a3a3a;
  --accepted: #1f4d25; --rejected: #5c2323; --correction: #5e4708; --bonus: #17406e;
  --draft: #8a8a8a; --verify: #ddd; --other: #4a4a4a; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
  max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.3rem; } h2 { font-size: 1.1rem; margin-top: 2.5rem; }
.prompt, .output { white-space: pre-wrap; overflow-wrap: anywhere; border-left: 3px solid var(--line);
  padding-left: .8rem; }
.faint { color: var(--faint); }
table { border-collapse: collapse; width: 100%; }
th { text-align: left; font-weight: 600; }
th.number { width: 3.5rem; }
th.number, td.number { text-align: right; font-variant-numeric: tabular-nums; }
td, th { border-bottom: 1px solid var(--line); padding: .3rem .5rem; vertical-align: top; }
.token { font-family: ui-monospace, monospace; font-size: .85rem; white-space: pre-wrap; overflow-wrap: anywhere;
  border-radius: 3px; padding: .05rem .15rem; margin: 0 1px; position: relative; cursor: default; }
.accepted { background: var(--accepted); }
.rejected { background: var(--rejected); text-decoration: line-through; }
.correction { background: var(--correction); border-bottom: 2px solid; }
.bonus { background: var(--bonus); border-bottom: 2px dotted; }
.token .tip { display: none; position: absolute; left: 0; top: 1.7em; z-index: 1; white-space: nowrap;
  background: var(--ink); color: var(--paper); padding: .2rem .5rem; border-radius: 3px; }
.token:hover .tip, .token:focus .tip { display: block; }
.bar { display: flex; height: .8rem; min-width: 1px; }
.bar span { display: block; height: 100%; }
.draft { background: var(--draft); } .verify { background: var(--verify); }
.other { background: var(--other); }
td.time { width: 12rem; }
""".strip()


def trace_page(traces: Sequence[TraceRecord], title: str = "selfspec trace") -> str:
    """The page for one or several generations. Raises `UserError` for no traces, or a token of an unknown kind."""
    if not traces:
        raise UserError("no trace to show; write some with `write_traces` first.")
    for trace in traces:
        for token in chain.from_iterable(entry.tokens for entry in trace.rounds):
            if token.kind not in KINDS:
                raise UserError(f"trace {trace.prompt_id!r}: token kind {token.kind!r}; allowed: {', '.join(KINDS)}.")
    legend = " ".join(f'<span class="token {kind}">{kind}</span> {meaning}.' for kind, meaning in KINDS.items())
    bars = " ".join(f'<span class="{phase}">&emsp;&emsp;</span> {phase}' for phase in PHASES)
    body = "\n".join(_section(trace) for trace in traces)
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<title>{_text(title)}</title>\n'
        f"<style>\n{STYLE}\n</style>\n</head>\n<body>\n<h1>{_text(title)}</h1>\n"
        f'<p class="legend">{legend} Point at a token for its q and p. Time: {bars}</p>\n{body}\n</body>\n</html>\n'
    )


def _section(trace: TraceRecord) -> str:
    kept = [token for entry in trace.rounds for token in entry.tokens if token.kind != "rejected"]
    num_rounds, num_rejected = len(trace.rounds), sum(len(entry.tokens) for entry in trace.rounds) - len(kept)
    seconds = sum(_round_s(entry) for entry in trace.rounds)
    longest = max((_round_s(entry) for entry in trace.rounds), default=0.0) or 1.0
    facts = f"{len(kept)} tokens in {num_rounds} rounds, {num_rejected} drafted tokens rejected, {seconds:.3f} s"
    if num_rounds:
        facts += f"; τ = {len(kept) / num_rounds:.2f} tokens per verify pass"
    if not trace.times_measured:
        facts += "; times of the traced generation itself, slower than measured ones"
    rows = "\n".join(_row(index, entry, longest) for index, entry in enumerate(trace.rounds, start=1))
    return (
        f"<section>\n<h2>{_text(trace.prompt_id)}: {_text(trace.method)}</h2>\n"
        f'<p class="facts">{facts}</p>\n<p class="prompt faint">{_text(trace.prompt_text)}</p>\n'
        f'<p class="output">{_text("".join(token.text for token in kept))}</p>\n<table>\n<thead><tr>'
        '<th class="number">round</th><th>tokens</th><th class="number">ms</th><th>draft, verify, other</th></tr>'
        "</thead>\n"
        f"<tbody>\n{rows}\n</tbody>\n</table>\n</section>"
    )


def _row(number: int, entry: TraceRound, longest_s: float) -> str:
    times = {phase: getattr(entry, f"{phase}_s") for phase in PHASES}
    parts = "".join(
        f'<span class="{phase}" style="width:{100 * value / longest_s:.2f}%"></span>' for phase, value in times.items()
    )
    spoken = ", ".join(f"{phase} {1000 * value:.2f} ms" for phase, value in times.items())
    tokens = "".join(_token(token) for token in entry.tokens)
    return (
        f'<tr><td class="number">{number}</td><td>{tokens}</td><td class="number">{1000 * _round_s(entry):.1f}</td>'
        f'<td class="time"><div class="bar" role="img" aria-label="{spoken}" title="{spoken}">{parts}</div></td></tr>'
    )


def _token(token: TraceToken) -> str:
    chances = [f"{name} = {value:.4g}" for name, value in (("q", token.q), ("p", token.p)) if value is not None]
    tip = ", ".join([token.kind, f"id {token.token_id}", *chances])
    shown = _text(token.text.translate(VISIBLE)) or "∅"
    return f'<span class="token {token.kind}" tabindex="0">{shown}<span class="tip">{tip}</span></span>'


def _round_s(entry: TraceRound) -> float:
    return entry.draft_s + entry.verify_s + entry.other_s


def _text(text: str) -> str:
    return html.escape(text.replace("\0", "\N{REPLACEMENT CHARACTER}"))
