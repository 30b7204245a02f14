"""The main job on the paged cache: the tokens of the contiguous one, in a run directory of its own that says so."""

from __future__ import annotations

from pathlib import Path

from hydra import compose, initialize_config_dir

from selfspec.cache.storage import STORAGES
from selfspec.config import CACHES, conf_dir
from selfspec.measure import methods
from selfspec.records import read_run
from selfspec.report.caption import caption
from selfspec.report.runs import measured
from selfspec.run import run_compare


def test_every_cache_of_the_config_is_a_storage():
    assert set(CACHES) == set(STORAGES)


def test_compare_on_the_paged_cache_writes_the_same_tokens(tmp_path: Path, monkeypatch):
    made = []
    decoder = methods.Decoder

    def noted(*arguments, **options):
        made.append(options["cache"])
        return decoder(*arguments, **options)

    monkeypatch.setattr(methods, "Decoder", noted)
    runs = {}
    for cache in CACHES:
        made.clear()
        with initialize_config_dir(str(conf_dir()), version_base="1.3"):
            composed = compose(
                "compare", ["experiment=smoke_tiny", f"output_dir={tmp_path / cache}", f"runtime.cache={cache}"]
            )
        run_compare(composed)
        assert made and set(made) == {cache}
        (done,) = (tmp_path / cache).rglob("DONE")
        runs[cache] = read_run(done.parent)
    tokens = {cache: {record.key: record.token_ids for record in run.prompts} for cache, run in runs.items()}
    assert tokens["paged"] == tokens["contiguous"] and len(tokens["paged"]) >= 12
    assert runs["paged"].path.name != runs["contiguous"].path.name
    assert "paged cache" in caption([measured(runs["paged"])])
    assert "cache" not in caption([measured(runs["contiguous"])])
