# The downstream benchmark: questions about contexts, every method at every budget, the bytes that are held.
from contourkv.benchmark.configured import (
    check_benchmark,
    made_of,
    model_tasks,
    planned_rows,
    probed_tasks,
    task_rows,
    task_wheels,
)

try:
    check_benchmark(config)
except ContourKVError as error:
    sys.exit(f"error: {error}")


BENCHMARK = config["benchmark"]
TASKS = {settings["name"]: settings for settings in BENCHMARK["tasks"]}
ASKED = model_tasks(BENCHMARK)
PROBED = probed_tasks(BENCHMARK)
BENCHMARK_TABLES = SECTIONS["5 Bytes and downstream"]
BENCHMARK_FIGURES = {
    "fig_bytes_score": ["scores"],
    "fig_comparisons": ["comparison_counts"],
    "fig_enforcing": ["enforcing"],
    "fig_visibility": ["visibility"],
    "fig_decomposition": ["decomposition"],
}


rule make_task:
    input:
        model=expand("<resources>/models/{{model}}/{file}", file=MODEL_FILES),
        wheels=lambda wildcards: [
            wheel(requirement) for requirement in task_wheels(TASKS[wildcards.task], config["text_sources"])
        ],
        rows=lambda wildcards: task_rows(TASKS[wildcards.task]),
    output:
        "<results>/benchmark/tasks/{model}/{task}.json",
    log:
        "<logs>/make_task/{model}/{task}.log",
    benchmark:
        "<benchmarks>/make_task/{model}/{task}.tsv"
    conda:
        "../../envs/contourkv.yaml"
    resources:
        mem_mb=memory(2000),
    params:
        settings=lambda wildcards: made_of(TASKS[wildcards.task]),
        text_sources=lambda wildcards: {
            arm: source for arm, source in config["text_sources"].items() if arm == TASKS[wildcards.task].get("arm")
        },
        wheels="resources/wheels",
        hashes=lambda wildcards: hashes(task_wheels(TASKS[wildcards.task], config["text_sources"])),
        hub_lock=HUB_LOCK,
        commit=lambda wildcards, output: planned_rows(TASKS[wildcards.task], HUB_LOCK, output[0]),
        code=code("make_task.py"),
        locked=locked("make_task.py"),
    message:
        "make the task {wildcards.task} for {wildcards.model}"
    script:
        "../scripts/make_task.py"


rule ask:
    input:
        model=expand("<resources>/models/{{model}}/{file}", file=MODEL_FILES),
        task="<results>/benchmark/tasks/{model}/{task}.json",
    output:
        "<results>/benchmark/answers/{model}/{task}.parquet",
    log:
        "<logs>/ask/{model}/{task}.log",
    benchmark:
        "<benchmarks>/ask/{model}/{task}.tsv"
    conda:
        "../../envs/contourkv.yaml"
    resources:
        mem_mb=memory(6000),
        gpu=int(config["device"] != "cpu"),
    params:
        settings={key: BENCHMARK[key] for key in ("methods", "query_aware", "budgets")},
        device=config["device"],
        code=code("ask.py"),
        locked=locked("ask.py"),
    message:
        "ask {wildcards.model} the questions of {wildcards.task}"
    script:
        "../scripts/ask.py"


# One thread, as every job: seconds are to be compared within one run.
rule probe_costs:
    input:
        model=expand("<resources>/models/{{model}}/{file}", file=MODEL_FILES),
        task=lambda wildcards: f"<results>/benchmark/tasks/{wildcards.model}/{PROBED[wildcards.model, int(wildcards.length)]}.json",
    output:
        "<results>/benchmark/costs/{model}/{length}.parquet",
    log:
        "<logs>/probe_costs/{model}/{length}.log",
    benchmark:
        "<benchmarks>/probe_costs/{model}/{length}.tsv"
    conda:
        "../../envs/contourkv.yaml"
    resources:
        mem_mb=memory(6000),
        gpu=int(config["device"] != "cpu"),
    params:
        settings={key: BENCHMARK[key] for key in ("methods", "budgets", "costs")},
        device=config["device"],
        code=code("probe_costs.py"),
        locked=locked("probe_costs.py"),
    message:
        "probe what methods cost {wildcards.model} at {wildcards.length} tokens"
    script:
        "../scripts/probe_costs.py"


rule merge_answers:
    input:
        answers=[f"<results>/benchmark/answers/{model}/{task}.parquet" for model, task in ASKED],
        costs=[f"<results>/benchmark/costs/{model}/{length}.parquet" for model, length in PROBED],
    output:
        "<results>/benchmark/answers.parquet",
    log:
        "<logs>/merge_answers.log",
    benchmark:
        "<benchmarks>/merge_answers.tsv"
    conda:
        "../../envs/contourkv.yaml"
    resources:
        mem_mb=memory(2000),
    params:
        code=code("merge_answers.py"),
        locked=locked("merge_answers.py"),
    message:
        "join all answers and costs"
    script:
        "../scripts/merge_answers.py"


rule benchmark_tables:
    input:
        "<results>/benchmark/answers.parquet",
    output:
        csv=[shown(f"<results>/benchmark/{table}.csv", table) for table in BENCHMARK_TABLES],
        md=expand("<results>/benchmark/{table}.md", table=BENCHMARK_TABLES),
    log:
        "<logs>/benchmark_tables.log",
    benchmark:
        "<benchmarks>/benchmark_tables.tsv"
    conda:
        "../../envs/contourkv.yaml"
    resources:
        mem_mb=memory(4000),
    params:
        run=config["run"],
        labels={model: LABELS[model] for model in BENCHMARK["models"]},
        comparisons=BENCHMARK["comparisons"],
        code=code("benchmark_tables.py"),
        locked=locked("benchmark_tables.py"),
    message:
        "make the benchmark's tables"
    script:
        "../scripts/benchmark_tables.py"


for figure, tables in BENCHMARK_FIGURES.items():

    rule:
        name:
            figure
        input:
            expand("<results>/benchmark/{table}.csv", table=tables),
        output:
            pdf=f"<results>/benchmark/figures/{figure}.pdf",
            png=shown(f"<results>/benchmark/figures/{figure}.png", figure, *tables),
        log:
            f"<logs>/figures/{figure}.log",
        benchmark:
            f"<benchmarks>/figures/{figure}.tsv"
        conda:
            "../../envs/contourkv.yaml"
        resources:
            mem_mb=memory(1000),
        params:
            figure=figure,
            code=code("figure.py"),
            locked=locked("figure.py"),
        message:
            f"draw {figure}"
        script:
            "../scripts/figure.py"


rule benchmark_all:
    input:
        rules.benchmark_tables.output if TASKS else [],
        expand(
            "<results>/benchmark/figures/{figure}.{ending}",
            figure=BENCHMARK_FIGURES if TASKS else [],
            ending=["pdf", "png"],
        ),
    message:
        "the benchmark is there"
