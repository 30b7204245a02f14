"""Which attention and MLP sublayers a draft should skip, without training: a search on tuning prompts.

    python experiments/layer_skip.py target=smollm2-135m search=knapsack out=skips/knapsack
    python experiments/layer_skip.py target=hf target.path=... 'search=[random,bayes,clasp,knapsack]' trials=200

random, bayes    sets drawn at random, or by Optuna's TPE over one switch per sublayer (Draft & Verify, arXiv
                 2309.08168, searches with a Gaussian process over the same switches); each one is measured
clasp, knapsack  one dynamic program gives a set of every size (`selfspec.drafters.skip_search`); all are measured

All judge a set by the tokens per second that it should bring (`selfspec.measure.skip_speed`). Not resumable: it takes
one pass over the answers per set, minutes where decoding with every set would take hours.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import MISSING, DictConfig

from selfspec.config import GenerateConfig, RuntimeConfig, TargetConfig, allowed, typed, validate
from selfspec.drafters.skip_set import FILE, SkipSet, write_set
from selfspec.errors import UserError
from selfspec.measure.items import longest_prompt, make_item
from selfspec.measure.skip_bench import SkipBench, Texts
from selfspec.measure.skip_speed import Prediction, SublayerCosts, as_record, measure_costs, predict
from selfspec.prompts import Prompt, prompts_from_config
from selfspec.report.render import print_table
from selfspec.report.tables import DASH, Block, Table
from selfspec.run import entry_point, settle_runtime
from selfspec.sampling import Sampling
from selfspec.target import Target, load_target

SEARCHES = ("random", "bayes", "clasp", "knapsack")
HEADER = ["skipped attention/MLP", "first", "α", "c", "K", "τ", "predicted tokens/s", "over AR", "τ decoded"]


@dataclass
class LayerSkipConfig:
    """conf/layer_skip.yaml."""

    target: TargetConfig = field(default_factory=TargetConfig)
    prompts: dict[str, Any] = field(default_factory=dict)
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)
    search: Any = MISSING
    trials: int = 100
    out: str | None = None
    max_new_tokens: int = 48
    positions: int = 24
    states: int = 4
    temperature: float = 0.0
    most_drafted: int = 8
    context: int | None = None
    repeats: int = 15
    most_skipped: float = 0.6
    shown: int = 5
    decoded: bool = True
    seed: int = 0

    @property
    def searches(self) -> list[str]:
        return [self.search] if isinstance(self.search, str) else list(self.search)


def check(config: LayerSkipConfig) -> list[Prompt]:
    """The tuning prompts. UserError for anything that cannot be searched, before a model is loaded."""
    for name in config.searches:
        if name not in SEARCHES:
            raise UserError(f"search={name!r} is unknown. {allowed(str(name), SEARCHES)}")
    for name in ("trials", "max_new_tokens", "positions", "states", "most_drafted", "repeats", "shown"):
        if getattr(config, name) < 1:
            raise UserError(f"{name}={getattr(config, name)} is not possible: allowed is 1 or more.")
    if not 0 < config.most_skipped < 1:
        raise UserError(f"most_skipped={config.most_skipped} is not possible: a share between 0 and 1.")
    Sampling(temperature=config.temperature)
    validate(GenerateConfig(target=config.target, runtime=config.runtime))
    prompts = prompts_from_config(config.prompts)
    if reported := [prompt.prompt_id for prompt in prompts if prompt.split != "tune"]:
        raise UserError(
            f"{len(reported)} of these prompts, for example {reported[0]!r}, are for reports: what is chosen on them "
            "reads too high there. Search on prompts=selfspec_tune24, or with prompts.split=tune."
        )
    return prompts


# ---- the sets that are tried


def draw(config: LayerSkipConfig, num_layers: int) -> Iterator[SkipSet]:
    """Sets of a random size, of sublayers of all layers but the first and the last."""
    rng = random.Random(config.seed)
    items = [(layer, half) for layer in range(1, num_layers - 1) for half in (0, 1)]
    most = max(1, int(config.most_skipped * 2 * num_layers))
    for _ in range(config.trials):
        chosen = rng.sample(items, rng.randint(1, min(most, len(items))))
        yield SkipSet.of(*([layer for layer, half in chosen if half == which] for which in (0, 1)))


def bayes(config: LayerSkipConfig, bench: SkipBench, costs: SublayerCosts) -> list[Prediction]:
    """One switch per sublayer, proposed by TPE; it begins with ten random sets of the sizes of `draw`."""
    try:
        import optuna
    except ImportError:
        raise UserError("search=bayes needs Optuna: pip install -c constraints.txt -e '.[study]'") from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    num_layers = costs.num_layers
    names = {f"{half}{layer}": (half, layer) for layer in range(1, num_layers - 1) for half in ("attention", "mlp")}
    study = optuna.create_study(
        direction="maximize", sampler=optuna.samplers.TPESampler(seed=config.seed, n_startup_trials=10)
    )
    for one in draw(config, num_layers):
        if len(study.trials) == 10:
            break
        study.enqueue_trial({name: layer in getattr(one, half) for name, (half, layer) in names.items()})
    found = []
    switch = optuna.distributions.CategoricalDistribution([False, True])
    for _ in range(config.trials):
        trial = study.ask(dict.fromkeys(names, switch))
        on = [names[name] for name, chosen in trial.params.items() if chosen]
        skipped = SkipSet.of(*([layer for half, layer in on if half == which] for which in ("attention", "mlp")))
        found.append(judge(bench, costs, skipped))
        study.tell(trial, found[-1].tokens_per_s)
    return found


def judge(bench: SkipBench, costs: SublayerCosts, skipped: SkipSet) -> Prediction:
    return predict(skipped, bench.alpha(skipped), costs)


def tried(name: str, config: LayerSkipConfig, bench: SkipBench, costs: SublayerCosts) -> list[Prediction]:
    """Every set that this search measures, best first."""
    if name == "bayes":
        found = bayes(config, bench, costs)
    else:
        num_layers = costs.num_layers
        sets = {
            "random": lambda: list(draw(config, num_layers)),
            "clasp": lambda: bench.clasp(num_layers - 2),
            "knapsack": lambda: bench.knapsack(costs),
        }[name]()
        found = [judge(bench, costs, skipped) for skipped in sets]
    distinct = {one.skipped: one for one in found if one.skipped.size}
    if not distinct:
        raise UserError(f"search={name} found no set that skips anything; {costs.num_layers} layers may be too few.")
    return sorted(distinct.values(), key=lambda one: -one.tokens_per_s)


# ---- the table and the file


def row(one: Prediction, num_layers: int, tau_decoded: float | None) -> list[str]:
    return [
        f"{len(one.skipped.attention)}/{len(one.skipped.mlp)} of {num_layers}",
        str(one.skipped.first(num_layers)),
        f"{one.alpha:.3f}",
        f"{one.c:.2f}",
        str(one.num_drafted),
        f"{one.tau:.2f}",
        f"{one.tokens_per_s:.1f}",
        f"{one.speedup:.2f}" + ("" if one.speedup > 1 else " (does not pay)"),
        DASH if tau_decoded is None else f"{tau_decoded:.2f}",
    ]


def caption(target: Target, costs: SublayerCosts, texts: Texts, temperature: float) -> str:
    num_rows, num = texts.positions_BN.shape
    ms = [f"{1000 * seconds:.2f}" for seconds in (costs.attention_s, costs.mlp_s, costs.head_s, costs.step_s)]
    return (
        f"{target.name}: drafts without some sublayers, predicted. One attention {ms[0]} ms, one MLP {ms[1]} ms, head "
        f"{ms[2]} ms, AR step {ms[3]} ms ({1 / costs.step_s:.1f} tokens/s); verifying {len(costs.verify)} tokens costs "
        f"{costs.verify[-1]:.2f} steps. α at temperature {temperature:g} over {num_rows} answers, {num} positions each."
    )


NOTES = [
    "α: of a round's first draft; τ and tokens/s follow from it at the best K, were it the same for every draft",
    "τ decoded: emitted tokens per round at that K, counted while decoding the same prompts",
    "first: the first layer with a skip; verification goes on from there",
]


@entry_point("layer_skip")
def main(composed: DictConfig) -> None:
    search(typed(LayerSkipConfig, composed))


def search(config: LayerSkipConfig) -> Prediction:
    """Search, print, and write the best set where `out` says; returns it."""
    prompts = check(config)
    settle_runtime(GenerateConfig(target=config.target, runtime=config.runtime))
    target = load_target(config.target, dtype=config.runtime.dtype, device=config.runtime.device)
    longest_prompt(target, prompts, config.max_new_tokens)
    prompt_ids = [list(make_item(target, prompt).token_ids) for prompt in prompts]
    sampling = Sampling(temperature=config.temperature)
    texts = Texts.written(target, prompt_ids, config.max_new_tokens, config.positions, sampling)
    bench = SkipBench(texts, config.temperature, config.states)
    context = texts.mean_context if config.context is None else config.context
    costs = measure_costs(target, context, config.most_drafted, config.repeats)
    blocks, best = [], list[tuple[str, Prediction]]()
    for name in config.searches:
        found = tried(name, config, bench, costs)
        best.append((name, found[0]))
        tau = None
        if config.decoded:
            tau = bench.decoded(found[0].skipped, found[0].num_drafted, prompt_ids, config.max_new_tokens)
        rows = [row(one, target.num_layers, tau if one is found[0] else None) for one in found[: config.shown]]
        blocks.append(Block(f"{name}: best of {len(found)} sets; {found[0].skipped}", rows))
    print_table(Table("layer_skip", HEADER, blocks, caption(target, costs, texts, config.temperature), NOTES))
    name, chosen = max(best, key=lambda pair: pair[1].tokens_per_s)
    if config.out:
        made = {key: value for key, value in asdict(config).items() if key not in ("target", "out", "shown")}
        write_set(Path(config.out) / FILE, chosen.skipped, target, made | {"search": name}, as_record(chosen))
        print(f"{Path(config.out) / FILE}")
    return chosen


if __name__ == "__main__":
    main()
