# What comes last: what the run took, and the run on one page.
PAGE_TABLES = {
    "tables": [*TABLES, *MORE_TABLES],
    "benchmark": BENCHMARK_TABLES if TASKS else [],
}
PAGE_FIGURES = {
    "figures": list(FIGURES),
    "benchmark/figures": list(BENCHMARK_FIGURES) if TASKS else [],
}
PAGE_FILES = [
    *(f"<results>/{folder}/{table}.csv" for folder, tables in PAGE_TABLES.items() for table in tables),
    *(f"<results>/{folder}/{figure}.png" for folder, figures in PAGE_FIGURES.items() for figure in figures),
]
# Rules whose jobs write a parquet file named as their record, and where.
INSTANCES = {
    "enumerate": "instances",
    "certify": "certificates",
    "ask": "benchmark/answers",
    "probe_costs": "benchmark/costs",
    "enumerate_structured": "structured/instances",
    **{part: part for part in ("native", "weights", "exact", "audit", "loss")},
}


# After everything else; its records are no inputs, as Snakemake knows no record as a file that a rule makes.
rule costs:
    input:
        PAGE_FILES,
        rules.summary.output,
    output:
        md=shown("<results>/costs.md", "costs"),
        csv="<results>/costs.csv",
    log:
        "<logs>/costs.log",
    benchmark:
        "<benchmarks>/costs.tsv"
    conda:
        "../../envs/contourkv.yaml"
    resources:
        mem_mb=memory(1000),
    params:
        run=config["run"],
        written=INSTANCES,
        without=["costs", "report_page"],
        code=code("costs.py"),
        locked=locked("costs.py"),
    message:
        "gather what the jobs took"
    script:
        "../scripts/costs.py"


rule report_page:
    input:
        PAGE_FILES,
        rules.merge_instances.output,
        rules.merge_answers.output if TASKS else [],
        rules.summary.output.csv,
        rules.costs.output.csv,
    output:
        "<results>/report.html",
    log:
        "<logs>/report_page.log",
    benchmark:
        "<benchmarks>/report_page.tsv"
    conda:
        "../../envs/contourkv.yaml"
    resources:
        mem_mb=memory(2000),
    params:
        contents={
            "run": config["run"],
            "labels": LABELS,
            "sections": SECTIONS,
            "tables": [table for tables in PAGE_TABLES.values() for table in tables],
            "figures": [figure for figures in PAGE_FIGURES.values() for figure in figures],
            "captions": {path.stem: path.read_text() for path in sorted((ROOT / "workflow/report").glob("*.rst"))},
            "config_file": rules.summary.params.config_file,
            "trained": rules.summary.params.trained,
        },
        code=code("report.py"),
        locked=locked("report.py"),
    message:
        "put the run on one page"
    script:
        "../scripts/report.py"
