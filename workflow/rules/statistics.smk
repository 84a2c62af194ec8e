# One table of instances, from it every table, and the paper's figures beside those measured here.
TABLES = [
    "ceiling",
    "kappa",
    "recovered",
    "content_arms",
    "prediction",
    "predictors",
    "edges",
    "cells",
    "certificates",
    "pools",
    "invariants",
    "kappa_quantiles",
]
# Those of the other parts that the run has.
MORE_TABLES = [
    *(part for part in ("native", "weights", "exact", "audit", "loss") if models_of(part)),
    *(["bounds", "structured_cells"] if config["structured"]["arms"] else []),
]
CONFIG_FILE = f"config/{config['run']}.yaml"


rule merge_instances:
    input:
        instances=rules.enumerate_all.input,
        certificates=rules.certify_all.input,
    output:
        "<results>/instances.parquet",
    log:
        "<logs>/merge_instances.log",
    benchmark:
        "<benchmarks>/merge_instances.tsv"
    conda:
        "../../envs/contourkv.yaml"
    resources:
        mem_mb=memory(4000),
    params:
        code=code("merge_instances.py"),
        locked=locked("merge_instances.py"),
    message:
        "join all instances and certificates"
    script:
        "../scripts/merge_instances.py"


rule tables:
    input:
        "<results>/instances.parquet",
    output:
        csv=[shown(f"<results>/tables/{table}.csv", table) for table in TABLES],
        md=expand("<results>/tables/{table}.md", table=TABLES),
    log:
        "<logs>/tables.log",
    benchmark:
        "<benchmarks>/tables.tsv"
    conda:
        "../../envs/contourkv.yaml"
    resources:
        mem_mb=memory(4000),
    params:
        run=config["run"],
        statistics=config["statistics"],
        labels=LABELS,
        apart=APART,
        families=config["enumeration"]["families"],
        code=code("tables.py"),
        locked=locked("tables.py"),
    message:
        "make the tables"
    script:
        "../scripts/tables.py"


rule summary:
    input:
        instances="<results>/instances.parquet",
        tables=rules.tables.output.csv,
        more=[f"<results>/tables/{table}.csv" for table in MORE_TABLES],
        benchmark=rules.benchmark_tables.output.csv if TASKS else [],
    output:
        summary=shown("<results>/summary.md", "summary"),
        paper=shown("<results>/paper.md", "paper"),
        csv="<results>/paper.csv",
    log:
        "<logs>/summary.log",
    benchmark:
        "<benchmarks>/summary.tsv"
    conda:
        "../../envs/contourkv.yaml"
    resources:
        mem_mb=memory(4000),
    params:
        run=config["run"],
        statistics=config["statistics"],
        config_file=CONFIG_FILE if (ROOT / CONFIG_FILE).exists() else None,
        trained=[LABELS[model] for model in APART],
        code=code("summary.py"),
        locked=locked("summary.py"),
    message:
        "write the summary"
    script:
        "../scripts/summary.py"


rule statistics_all:
    input:
        rules.tables.output,
    message:
        "every table of the measurement is there"
